"""Durations of launches on one machine, kept from load to load and refined by each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.costs.signature import signature_of
from offload.errors import CostModelError
from offload.program import Program

FORMAT = 1
LEAST_MEASUREMENTS = 3
"""Measurements after which a duration is used without measuring again. Each is the median of
several executions; StarPU, which counts single ones, asks for 10."""

ANY = "*"
"""In place of a machine's name: any machine's, or several machines'."""

MOST_RATIO = 1.5
"""A measurement further than this from the mean is an outlier (StarPU's default of 50 %)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchCost:
    """The measurements of one signature on one device.

    History-based performance models: C. Augonnet, S. Thibault, R. Namyst, "Automatic Calibration
    of Performance Models on Heterogeneous Multicore Architectures", HPPC 2009; the rule for
    outliers is that of StarPU (src/core/perfmodel/perfmodel_history.c,
    _starpu_update_perfmodel_history).

    Attributes:
        n_measurements: in the mean.
        mean_ns: of them.
        squares_ns2: the sum of squared distances from the mean (B. P. Welford, Technometrics
            4(3), 1962).
        n_outliers: measurements since the first that are in no mean.
    """

    n_measurements: int
    mean_ns: float
    squares_ns2: float = 0.0
    n_outliers: int = 0

    @property
    def deviation_ns(self) -> float:
        """The standard deviation of the measurements."""
        return math.sqrt(self.squares_ns2 / self.n_measurements)

    @property
    def is_known(self) -> bool:
        """Whether it is used without measuring again."""
        return self.n_measurements >= LEAST_MEASUREMENTS

    def taking(self, duration_ns: float) -> LaunchCost:
        """With one more measurement. As many outliers as measurements: restart from the last."""
        low, high = sorted((duration_ns, self.mean_ns))
        if high > MOST_RATIO * low:
            if self.n_outliers + 1 >= self.n_measurements:
                return LaunchCost(1, duration_ns)
            return dataclasses.replace(self, n_outliers=self.n_outliers + 1)
        n = self.n_measurements + 1
        distance = duration_ns - self.mean_ns
        mean_ns = self.mean_ns + distance / n
        squares = self.squares_ns2 + distance * (duration_ns - mean_ns)
        return LaunchCost(n, mean_ns, squares, self.n_outliers)


Costs = dict[str, dict[str, LaunchCost]]


class LaunchCosts:
    """Durations of launches by device and signature, in a file or in this process alone.

    A load that is given it (`Captured.load(costs=)`) takes from it what it knows, measures the
    rest, and adds what it has measured. A file is written by `save`; several processes may save to
    one file, which then has the measurements of all.

    Owner: shared. Thread: any.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, machine: str = "") -> None:
        """Read a file where there is one.

        Args:
            path: of the file, which need not exist; None: of this process alone.
            machine: the name that the file must have been measured on, by default this processor's
                name as the first load finds it. "*" accepts any machine's measurements. A file that
                was saved with those of several machines is accepted only by "*".

        Raises:
            CostModelError: the file is damaged, of another format, or of another machine.
        """
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._accepts_any = machine == ANY
        self._machine = "" if self._accepts_any else machine
        self._costs: Costs = {}
        self._added: list[tuple[str, str, float]] = []  # what `save` adds to the file
        self._added_on: set[str] = set()  # machines
        if self._path is not None:
            found, self._costs = self._read()
            self._machine = self._machine or found

    @property
    def machine(self) -> str:
        """The processor that was measured; empty before the first measurement, "*" of several."""
        return self._machine

    @property
    def costs(self) -> Mapping[str, Mapping[str, LaunchCost]]:
        """By device and signature, as they are now."""
        with self._lock:
            return {device: dict(known) for device, known in self._costs.items()}

    def known_ns(self, machine: str, device: str, program: Program) -> tuple[float, ...] | None:
        """The duration of each launch, if all are known; else None.

        Args:
            machine: the name of the processor.
            device: what launches run on, with all that their durations depend on: "cpu, 1 thread".
            program: whose launches.

        Raises:
            CostModelError: the measurements are of another machine.
        """
        self._check(machine)
        with self._lock:
            known = self._costs.get(device, {})
            found = [known.get(signature_of(one)) for one in program.launches]
        times = [one.mean_ns for one in found if one is not None and one.is_known]
        return tuple(times) if len(times) == len(found) else None

    def take(self, machine: str, device: str, program: Program, launch_ns: Sequence[float]) -> None:
        """Add one measurement of each launch of a Program; of equal launches, their mean.

        Raises:
            CostModelError: the measurements are of another machine.
        """
        self._check(machine)
        by_signature: dict[str, list[float]] = {}
        for launch, ns in zip(program.launches, launch_ns, strict=True):
            by_signature.setdefault(signature_of(launch), []).append(max(ns, 1.0))
        with self._lock:
            self._machine = _joined({self._machine, machine})
            self._added_on.add(machine)
            for signature, times in by_signature.items():
                one = (device, signature, math.fsum(times) / len(times))
                if self._path is not None:
                    self._added.append(one)
                _add(self._costs, *one)

    def save(self) -> Path:
        """Write the file, with what other processes have added to it meanwhile.

        Raises:
            CostModelError: there is no path, or the file cannot be written.
        """
        if self._path is None:
            raise CostModelError("these costs have no file: make them with LaunchCosts(path)")
        with self._lock, self._file_lock():
            found, costs = self._read()
            machine = _joined({found, *self._added_on}) or self._machine
            for one in self._added:
                _add(costs, *one)
            document = {
                "format": FORMAT,
                "machine": machine,
                "devices": {
                    device: {name: dataclasses.astuple(one) for name, one in sorted(known.items())}
                    for device, known in sorted(costs.items())
                },
            }
            partial = self._path.with_suffix(f".{os.getpid()}.partial")
            try:
                partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
                partial.replace(self._path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise CostModelError(f"costs cannot be written: {error}") from error
            self._machine = machine
            self._costs, self._added = costs, []
            self._added_on.clear()
        return self._path

    def __str__(self) -> str:
        """A line for each device: signatures, measurements, and the typical spread."""
        lines = [f"durations of launches on {self._machine or 'no machine yet'}:"]
        for device, known in sorted(self.costs.items()):
            spreads = sorted(one.deviation_ns / one.mean_ns for one in known.values())
            n_known = sum(one.is_known for one in known.values())
            spread = f", median deviation {spreads[len(spreads) // 2]:.0%}" if spreads else ""
            lines.append(f"  {device}: {n_known} of {len(known)} signatures known{spread}")
        return "\n".join(lines)

    def _check(self, machine: str) -> None:
        if self._machine not in ("", machine) and not self._accepts_any:
            of = "several machines" if self._machine == ANY else self._machine
            raise CostModelError(
                f"expected durations of {machine}, got those of {of}: measure here, or "
                'accept them with LaunchCosts(path, machine="*")'
            )

    def _read(self) -> tuple[str, Costs]:
        assert self._path is not None
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return "", {}
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            raise CostModelError(f"costs cannot be read: {error}") from error
        try:
            found, costs = _decode(json.loads(content))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CostModelError(
                f"{self._path} is damaged ({type(error).__name__}: {error}): delete it and measure "
                "again"
            ) from error
        if not self._accepts_any and found and self._machine not in ("", found):
            raise CostModelError(
                f"{self._path}: expected durations of {self._machine}, got those of {found}"
            )
        return found, costs

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        """One process at a time between reading the file and replacing it."""
        import fcntl  # noqa: PLC0415 - only where files are written

        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise CostModelError(f"costs cannot be written: {error}") from error


def _joined(machines: set[str]) -> str:
    """The name for measurements of these machines; empty names are unknown ones."""
    known = machines - {""}
    return ANY if len(known) > 1 else "".join(known)


def _add(costs: Costs, device: str, signature: str, duration_ns: float) -> None:
    known = costs.setdefault(device, {})
    before = known.get(signature)
    known[signature] = LaunchCost(1, duration_ns) if before is None else before.taking(duration_ns)


def _decode(document: dict[str, Any]) -> tuple[str, Costs]:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}, expected {FORMAT}")
    if not isinstance(document["machine"], str):
        raise TypeError(f"machine {document['machine']!r}, expected a name")
    costs: Costs = {}
    for device, known in document["devices"].items():
        costs[str(device)] = {str(name): _cost(*values) for name, values in known.items()}
    return document["machine"], costs


def _cost(n_measurements: int, mean_ns: float, squares_ns2: float, n_outliers: int) -> LaunchCost:
    # 2^53 ns are 104 days. Sums of such durations stay below the 2^62 ns of the planners.
    if not (1 <= n_measurements < 2**53 and 0 < mean_ns < 2**53 and 0 <= squares_ns2 < math.inf):
        raise ValueError(f"{n_measurements} measurements of {mean_ns} ns on average")
    if not 0 <= n_outliers < 2**53:
        raise ValueError(f"{n_outliers} outliers")
    return LaunchCost(int(n_measurements), float(mean_ns), float(squares_ns2), int(n_outliers))
