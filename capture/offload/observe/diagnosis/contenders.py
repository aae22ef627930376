"""What a diagnosis times: a model's eager calls against its replays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from offload.console.progress import stage
from offload.observe.diagnosis.diagnosis import Gain, MeasuredGain, NamedTiming, UnknownGain
from offload.observe.diagnosis.evidence import Finding, NotApplied, enqueue_test, replay_test
from offload.observe.diagnosis.stopwatch import (
    Clock,
    Effort,
    quartiles,
    time_enqueue,
    time_in_turns,
)

TIMING = "timing calls"
"""The stage of calls in turns, for a display of progress."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contenders:
    """The calls that a diagnosis times; each returns the model's result or nothing.

    Attributes:
        eager: calls the model; on a device with a queue it may return before the work has ended.
        replay: executes the captured model likewise, or says why it cannot.
        synchronize: waits for the end of all work on the device; None if calls return then.
    """

    eager: Callable[[], object]
    replay: Callable[[], object] | NotApplied
    synchronize: Callable[[], object] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """The results of timing the contenders."""

    timings: tuple[NamedTiming, ...]
    findings: tuple[Finding, ...]
    not_applied: tuple[NotApplied, ...]
    gain: Gain


def measure(contenders: Contenders, clock: Clock, effort: Effort) -> Measurement:
    """Make the tests that apply: the enqueue test, and eager against replay."""
    timings: list[NamedTiming] = []
    findings: list[Finding] = []
    not_applied: list[NotApplied] = []
    if contenders.synchronize is None:
        not_applied.append(
            NotApplied(
                "enqueue",
                "the device has no queue: a call returns when its work is done, as on the CPU, "
                "where each operator runs on the calling thread",
            )
        )
    else:
        with stage("timing how calls are enqueued", effort.turns) as current:
            enqueue, total = time_enqueue(
                contenders.eager, contenders.synchronize, clock, effort, current.advance
            )
        timings += [NamedTiming("eager, enqueue", enqueue), NamedTiming("eager, one call", total)]
        findings.append(enqueue_test(enqueue, total))
    calls = {"eager": _finished(contenders.eager, contenders.synchronize)}
    if not isinstance(contenders.replay, NotApplied):
        calls["replay"] = _finished(contenders.replay, contenders.synchronize)
    with stage(TIMING, effort.turns) as current:
        timed = time_in_turns(calls, clock, effort, current.advance)
    timings += [NamedTiming(name, timing) for name, timing in timed.items()]
    gain: Gain
    if isinstance(contenders.replay, NotApplied):
        not_applied.append(contenders.replay)
        gain = UnknownGain(contenders.replay.reason)
    else:
        finding = replay_test(timed["eager"], timed["replay"])
        findings.append(finding)
        gain = _measured_gain(timed["eager"].samples_ns, timed["replay"].samples_ns)
    return Measurement(tuple(timings), tuple(findings), tuple(not_applied), gain)


def _measured_gain(eager_ns: tuple[float, ...], replay_ns: tuple[float, ...]) -> Gain:
    if not all(replay_ns):
        return UnknownGain("a replay was too short for the clock to measure")
    ratios = tuple(one / other for one, other in zip(eager_ns, replay_ns, strict=True))
    lower, median, upper = quartiles(ratios)
    return MeasuredGain(median, lower, upper)


def _finished(
    call: Callable[[], object], synchronize: Callable[[], object] | None
) -> Callable[[], object]:
    """The call followed by the wait for its work."""
    if synchronize is None:
        return call

    def call_and_wait() -> None:
        call()
        synchronize()

    return call_and_wait
