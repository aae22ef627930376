"""Executables of a Family on devices where each choice of sizes is loaded by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from offload.errors import CopyError, ExecutionError
from offload.host.call_sizes import CallSizes
from offload.host.loaded_bytes import loaded_bytes
from offload.host.sizes import InstanceReport, Sizes
from offload.interpreter.size_constants import program_at
from offload.program import BoundProgram
from offload.program.family import BoundFamily, Family
from offload.run import Executable, LastExecution, Ticket
from offload.run.submitting import (
    Args,
    Kwargs,
    Submitting,
    with_results,
)

Load = Callable[[BoundProgram], Executable]


@dataclasses.dataclass(frozen=True, slots=True)
class _Instance:
    """The Executable of one choice of sizes, and the memory that it takes."""

    run: Executable
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Latest:
    """Whose turn was the latest, and what making it ready took; 0 where it was."""

    sizes: tuple[int, ...]
    run: Executable
    prepare_ns: int


class ExecutableForEachSize(Submitting):
    """A Family that is loaded: called with any sizes that it accepts, and recorded once.

    Each choice of sizes has an instance, made when it is first met: its Program is evaluated,
    placed and loaded, and what follows from its sizes alone is computed. Instances share the
    model's weights. Made by `Captured.load` where sizes may vary.

    Owner of its instances. Calls from several threads are safe. Those of one choice of sizes run
    one at a time; where the Program writes inputs or weights, draws random numbers or may do more,
    all do, in the order in which they come.

    Calling it, as `run(x)` or `run(x, out=y)`, executes the Program of the call's sizes; it takes
    and gives what an Executable does. It raises what an Executable raises, and:
        BindingError: the sizes of the call fit no Dim or break a guard; nothing has run.
        CaptureError, PlanError, OutOfMemory: their Program cannot be loaded.

    Attributes:
        family: whose sizes vary.
        sizes: how much is kept.
    """

    def __init__(self, bound: BoundFamily, sizes: Sizes, load: Load, note: str = "") -> None:
        """Load nothing yet.

        Args:
            bound: the Family.
            sizes: how much is kept.
            load: makes a Program resident.
            note: for people, of how that is done.

        Raises:
            BindingError: `sizes` says no number of bytes.
        """
        self.sizes = sizes
        self._budget_bytes = sizes.budget_bytes
        self._bound = bound
        self._load = load
        self._note = note
        self._find = CallSizes(bound.family)
        self._kept: OrderedDict[tuple[int, ...], _Instance] = OrderedDict()
        self._kept_bytes = 0
        self._n_hits = self._n_misses = self._n_evicted = 0
        self._latest: _Latest | None = None
        self._closed = False
        self._making = threading.Lock()  # taken before the other
        self._lock = threading.Lock()
        self._keeps_order = bound.family.program.leaves_something
        self._turn = threading.Lock()
        self._latest_ticket: tuple[Executable, Ticket] | None = None  # the latest; under the turn

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "an executable lies in its device's memory, and cannot be copied or pickled: load the "
            "captured program once more"
        )

    @property
    def family(self) -> Family:
        """Whose sizes vary."""
        return self._bound.family

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute with new tensors, of any sizes that the Family accepts."""
        run = self._instance(self._find.of(args, kwargs))
        with self._in_turn(run):
            return run(*args, **kwargs)

    def submit(
        self, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Ticket:
        """Queue an execution and return at once; as `Executable.submit`.

        Where order matters it waits for tickets of other sizes first, and for tickets among the
        arguments, which tell sizes.
        """
        return self._submitted(args, {**kwargs, "out": out, "feature_map": feature_map}, ())

    def _submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        args, kwargs = with_results(args, kwargs, Ticket.result)
        buffers = {name: kwargs.pop(name, None) for name in ("out", "feature_map")}
        run = self._instance(self._find.of(args, kwargs))
        with self._in_turn(run):
            ticket = run.after(*after).submit(*args, **kwargs, **buffers)
            if self._keeps_order:
                self._latest_ticket = (run, ticket)
            return ticket

    @contextlib.contextmanager
    def _in_turn(self, run: Executable) -> Iterator[None]:
        """Execute after all that was submitted of other sizes, where order matters."""
        if not self._keeps_order:
            yield
            return
        with self._turn:
            if self._latest_ticket is not None and self._latest_ticket[0] is not run:
                self._latest_ticket[1]._outcome()  # an error is its owner's
                self._latest_ticket = None
            yield

    def at(self, sizes: Mapping[str, int]) -> Executable:
        """The instance of some sizes, made if it is not ready: to explain it, or for timelines.

        Raises:
            BindingError: the Family does not accept them.
            CaptureError, PlanError, OutOfMemory, ExecutionError: it cannot be loaded.
        """
        return self._instance(self.family.checked(sizes))

    def _instance(self, sizes: tuple[int, ...]) -> Executable:
        """The instance of sizes; the key is the sizes themselves, and no digest of them.

        Those that are kept were accepted when they were made. Others are made one at a time, while
        calls of those that are kept go on.
        """
        found = self._ready(sizes)
        if found is None:
            with self._making:
                found = self._ready(sizes) or self._add(sizes)
        return found

    def _ready(self, sizes: tuple[int, ...]) -> Executable | None:
        with self._lock:
            if self._closed:
                raise ExecutionError("the executable is closed: load the captured program again")
            found = self._kept.get(sizes)
            if found is None:
                return None
            self._kept.move_to_end(sizes)
            self._n_hits += 1
            self._latest = _Latest(sizes, found.run, prepare_ns=0)
            return found.run

    def _add(self, sizes: tuple[int, ...]) -> Executable:
        begin_ns = time.perf_counter_ns()
        named = dict(zip(self.family.names, sizes, strict=True))
        made = self._made(self.family.checked(named))
        prepare_ns = time.perf_counter_ns() - begin_ns
        with self._lock:
            if self._closed:
                made.run.close()
                raise ExecutionError("the executable was closed meanwhile: load it again")
            self._kept[sizes] = made
            self._kept_bytes += made.size_bytes
            self._n_misses += 1
            self._make_room()
            self._latest = _Latest(sizes, made.run, prepare_ns)
            return made.run

    def _made(self, sizes: tuple[int, ...]) -> _Instance:
        run = self._load(program_at(self._bound, sizes))
        return _Instance(run, run.feature_map_bytes + loaded_bytes(self._bound, run))

    def _make_room(self) -> None:
        """Let go of what was used least recently, until the rest fits; executions of it go on."""
        while self._kept_bytes > self._budget_bytes and len(self._kept) > 1:
            _, evicted = self._kept.popitem(last=False)
            self._kept_bytes -= evicted.size_bytes
            self._n_evicted += 1

    @property
    def instances(self) -> InstanceReport:
        """What became of the instances so far."""
        with self._lock:
            latest = self._latest
            sizes = () if latest is None else zip(self.family.names, latest.sizes, strict=True)
            return InstanceReport(
                self._n_hits,
                self._n_misses,
                self._n_evicted,
                len(self._kept),
                self._kept_bytes,
                sizes=tuple(sizes),
                was_hit=latest is not None and not latest.prepare_ns,
                prepare_ns=0 if latest is None else latest.prepare_ns,
            )

    @property
    def last_execution(self) -> LastExecution | None:
        """What the latest execution of the latest sizes did; None before the first."""
        latest = self._latest
        return None if latest is None else latest.run.last_execution

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, as `Executable.rebind_weights`.

        Raises:
            BindingError: a new storage is laid out otherwise than the recorded one.
        """
        with self._lock:
            for one in self._kept.values():
                one.run.rebind_weights()

    def explain(self) -> str:
        """What varies, and what is kept ready."""
        return "\n".join(filter(None, [str(self.family), str(self.instances), self._note]))

    def close(self) -> None:
        """Wait for what is in flight and give the memory back. Closing twice is fine."""
        with self._lock:
            self._closed = True
            kept = list(self._kept.values())
            self._kept.clear()
            self._kept_bytes = 0
            self._latest = None
        for one in kept:
            one.run.close()

    def __enter__(self) -> ExecutableForEachSize:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
