"""Tests that distinguish host-bound from device-bound, and their common verdict."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from offload.observe.diagnosis.idle import DeviceIdle
from offload.observe.diagnosis.stopwatch import Timing, quartiles


class Verdict(enum.StrEnum):
    """What the time of a call is spent on."""

    HOST_BOUND = "host-bound"
    """The device waits for the host, which delivers launches too slowly."""
    DEVICE_BOUND = "device-bound"
    """The device is busy; a faster host gains almost nothing."""
    BALANCED = "balanced"
    """Both matter: a faster host gains something."""
    UNDECIDED = "undecided"
    """No test could be applied."""


class Confidence(enum.StrEnum):
    """The reliability of a verdict; a Diagnosis gives reasons."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Thresholds:
    """A fraction of at least `host` is host-bound, of at most `device` device-bound."""

    host: float
    device: float

    def verdict(self, fraction: float) -> Verdict:
        """The verdict of a fraction; between the thresholds it is balanced."""
        if fraction >= self.host:
            return Verdict.HOST_BOUND
        return Verdict.DEVICE_BOUND if fraction <= self.device else Verdict.BALANCED


ENQUEUE_THRESHOLDS = Thresholds(host=0.9, device=0.7)
"""For t_enqueue / t_total: near 1 the device is done as soon as the host is, and far below 1 the
host is ahead of it. 0.9 keeps the duration of the last launch from counting as the host's.
"""

SHARE_THRESHOLDS = Thresholds(host=0.5, device=0.1)
"""For the share of a call that the host causes: from one half, removing it makes the call at least
twice as fast (1 / (1 - 0.5)); up to one tenth, removing it gains at most 11 % (1 / (1 - 0.1)),
which is near the spread of such measurements.
"""

_MOST_UNLINKED = 0.1  # share of device work without a launch record, above which a trace is weak


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test.

    Attributes:
        test: `enqueue`, `replay` or `idle`.
        measure: the definition of the fraction, as a formula.
        fraction: the median over the samples.
        lower, upper: its quartiles over the samples; equal to it for a trace.
        thresholds: between which it is balanced.
        profiled: it was taken under a profiler, which slows the host.
        caveat: what makes this finding weak; otherwise empty.
    """

    test: str
    measure: str
    fraction: float
    lower: float
    upper: float
    thresholds: Thresholds
    profiled: bool = False
    caveat: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict of this test alone."""
        return self.thresholds.verdict(self.fraction)

    @property
    def is_clear(self) -> bool:
        """Whether both quartiles give the same verdict as the median."""
        verdicts = {self.thresholds.verdict(one) for one in (self.lower, self.upper)}
        return verdicts == {self.verdict}


@dataclasses.dataclass(frozen=True, slots=True)
class NotApplied:
    """A test that could not be made, and why."""

    test: str
    reason: str


def enqueue_test(enqueue: Timing, total: Timing) -> Finding:
    """Compare the time until a call returns with the time until the device is done."""
    ratios = _paired(enqueue, total)
    lower, median, upper = quartiles(ratios)
    return Finding("enqueue", "t_enqueue / t_total", median, lower, upper, ENQUEUE_THRESHOLDS)


def replay_test(eager: Timing, replay: Timing) -> Finding:
    """Compare eager with replay: the share of a call that the host's work causes.

    An upper bound of the host's removable time: better kernels of a replay are counted too. A
    replay slower than eager gives a fraction below 0.
    """
    shares = tuple(1 - ratio for ratio in _paired(replay, eager))
    lower, median, upper = quartiles(shares)
    return Finding("replay", "1 - t_replay / t_eager", median, lower, upper, SHARE_THRESHOLDS)


def _paired(one: Timing, other: Timing) -> tuple[float, ...]:
    """Ratios of samples taken in the same turn, so that slow drift cancels."""
    pairs = zip(one.samples_ns, other.samples_ns, strict=True)
    return tuple(first / second if second else 1.0 for first, second in pairs)


def idle_test(idle: DeviceIdle, *, profiled: bool) -> Finding:
    """Return the share of the device's span in which it waited for the host's next launch.

    Args:
        idle: of at least two pieces of work, over a span that is not empty.
        profiled: it comes from a profiler's trace.
    """
    whole = idle.whole
    caveats = []
    if whole.n_unlinked > _MOST_UNLINKED * whole.n_work:
        caveats.append(
            f"{whole.n_unlinked} of {whole.n_work} pieces of device work have no launch record, "
            "so waiting for the host cannot be distinguished from other waiting"
        )
    if whole.other_ns > SHARE_THRESHOLDS.device * whole.span_ns:
        caveats.append(
            f"the device also waited {whole.other_ns / whole.span_ns:.0%} of its span for "
            "something else (events, other lanes)"
        )
    share = whole.host_wait_ns / whole.span_ns
    measure = "host wait / device span"
    return Finding(
        "idle", measure, share, share, share, SHARE_THRESHOLDS, profiled, "; ".join(caveats)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Conclusion:
    """The conclusion from all findings.

    Attributes:
        verdict: that of the first finding.
        confidence: high, unless there is a reason against it.
        reasons: why it is not higher; otherwise empty.
    """

    verdict: Verdict
    confidence: Confidence
    reasons: tuple[str, ...]


def conclude(findings: Sequence[Finding]) -> Conclusion:
    """Take the first finding's verdict, and determine its reliability.

    Args:
        findings: the most direct one first: enqueue, replay, idle.

    Low: findings contradict each other (host-bound against device-bound), or the first has a
    caveat. Medium: they differ otherwise, the quartiles disagree, or the first was taken under a
    profiler.
    """
    if not findings:
        return Conclusion(Verdict.UNDECIDED, Confidence.NONE, ("no test could be applied",))
    first = findings[0]
    low: list[str] = []
    medium: list[str] = []
    for other in findings[1:]:
        if other.verdict is not first.verdict:
            text = f"the {other.test} test says {other.verdict}"
            (medium if Verdict.BALANCED in (other.verdict, first.verdict) else low).append(text)
    if first.caveat:
        low.append(first.caveat)
    if not first.is_clear:
        medium.append(
            f"half of the samples lie between {first.lower:.2f} and {first.upper:.2f}, on both "
            "sides of a threshold"
        )
    if first.profiled:
        medium.append("the trace was taken under a profiler, which slows the host down")
    confidence = Confidence.LOW if low else Confidence.MEDIUM if medium else Confidence.HIGH
    return Conclusion(first.verdict, confidence, (*low, *medium))
