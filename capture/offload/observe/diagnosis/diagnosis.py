"""The Diagnosis that a user receives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from offload.observe.diagnosis.evidence import Confidence, Finding, NotApplied, Verdict
from offload.observe.diagnosis.idle import DeviceIdle
from offload.observe.diagnosis.kineto import ProfiledOperator
from offload.observe.diagnosis.operators import OperatorCosts
from offload.observe.diagnosis.stopwatch import Timing

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredGain:
    """The gain of capture: eager and replay, measured alternately on this machine.

    Attributes:
        speedup: t_eager / t_replay, the median over the turns.
        lower, upper: its quartiles.
    """

    speedup: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return (
            f"capture makes a call {self.speedup:.2f} times as fast (measured; quartiles "
            f"{self.lower:.2f} to {self.upper:.2f})"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class GainBound:
    """An upper bound on the gain of capture, from a trace: all waiting for the host removed."""

    speedup: float

    def __str__(self) -> str:
        return (
            f"without any waiting for the host, at most {self.speedup:.2f} times as fast as under "
            "the profiler"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownGain:
    """Why the gain of capture is unknown."""

    reason: str

    def __str__(self) -> str:
        return f"the gain of capture is not known: {self.reason}"


Gain = MeasuredGain | GainBound | UnknownGain


@dataclasses.dataclass(frozen=True, slots=True)
class NamedTiming:
    """The duration of one named call."""

    name: str
    timing: Timing


@dataclasses.dataclass(frozen=True, slots=True)
class TraceFigures:
    """Figures from a timeline or trace file; in a file all times are under a profiler.

    Attributes:
        idle: the device's idle time.
        mean_launch_ns: of the recorded launch calls of the host; None if there are none.
        n_short: pieces of device work that were shorter than their launch call.
        operators: on the host, longest self time first.
    """

    idle: DeviceIdle
    mean_launch_ns: float | None
    n_short: int
    operators: tuple[ProfiledOperator, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a model's time is spent on, the evidence, and the gain of capture.

    Attributes:
        subject: what was diagnosed.
        device: the device type; for a trace, what it states.
        verdict: host-bound, device-bound, balanced, or undecided.
        confidence: the reliability of the verdict.
        reasons: why the confidence is not higher.
        findings: the results of the tests, the most direct one first.
        not_applied: tests that could not be made, and why.
        timings: measured without a profiler.
        n_launches: of the captured Program; None if it was not captured.
        gain: of capture.
        operators: the eager cost of each operator signature; None if it was not captured.
        trace: from a timeline or trace file; None for a model.
        notes: what else is needed to interpret the figures.
    """

    subject: str
    device: str
    verdict: Verdict
    confidence: Confidence
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    not_applied: tuple[NotApplied, ...]
    timings: tuple[NamedTiming, ...]
    n_launches: int | None
    gain: Gain
    operators: OperatorCosts | None = None
    trace: TraceFigures | None = None
    notes: tuple[str, ...] = ()

    def timing(self, name: str) -> Timing | None:
        """The timing with a name, such as `eager` or `replay`; None if it was not measured."""
        return next((one.timing for one in self.timings if one.name == name), None)

    def __str__(self) -> str:
        """The verdict in one line."""
        reasons = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{self.subject}: {self.verdict} (confidence {self.confidence}{reasons})"

    def show(self, console: Console | None = None) -> None:
        """Print the verdict, the evidence, the most expensive operators, and the gain."""
        # Imported only to print: the library that draws tables takes 4 MiB of memory.
        from rich.console import Console  # noqa: PLC0415

        from offload.console.text import plain  # noqa: PLC0415
        from offload.observe.diagnosis.show import diagnosis_tables  # noqa: PLC0415

        target = console or Console()
        target.print(plain(str(self)), highlight=False, soft_wrap=True)
        for one in diagnosis_tables(self):
            target.print(one, highlight=False)
        target.print(plain(f"\n{self.gain}"), highlight=False, soft_wrap=True)
