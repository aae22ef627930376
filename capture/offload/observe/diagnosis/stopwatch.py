"""Measures calls without a profiler, on any clock."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol

_WARM_UP_CALLS = 3  # the first execution proves out-variants, and caches fill


class Clock(Protocol):
    """A source of time; tests pass a virtual one."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment; never decreases."""


class SteadyClock:
    """The system's monotonic clock of the highest resolution."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment."""
        return time.perf_counter_ns()


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """The effort of a measurement.

    Attributes:
        turns: samples of each contender, which alternate.
        sample_ns: a sample repeats the call for about this duration, so that reading the clock does
            not count.
        budget_ns: no further turn begins after this, but `least_turns` are always made.
        least_turns: enough for quartiles.
    """

    turns: int = 40
    sample_ns: int = 2_000_000
    budget_ns: int = 3_000_000_000
    least_turns: int = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Samples of the duration of one call.

    Attributes:
        samples_ns: the mean duration of a call in each sample, in measuring order; at least two.
        calls: the number of calls per sample.
    """

    samples_ns: tuple[float, ...]
    calls: int

    @property
    def median_ns(self) -> float:
        """The median sample."""
        return statistics.median(self.samples_ns)


def quartiles(samples: tuple[float, ...]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile of at least two samples."""
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return lower, median, upper


def time_in_turns(
    contenders: Mapping[str, Callable[[], object]],
    clock: Clock,
    effort: Effort,
    after_turn: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time one call of each contender, alternately, so that noise affects all of them.

    A contender returns when its work has ended: one that queues work must wait for it. `after_turn`
    is called between turns.
    """
    calls = {name: _calls_per_sample(one, clock, effort) for name, one in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    deadline_ns = clock.now_ns() + effort.budget_ns
    for turn in range(effort.turns):
        if turn >= effort.least_turns and clock.now_ns() > deadline_ns:
            break
        for name, contender in contenders.items():
            begin_ns = clock.now_ns()
            for _ in range(calls[name]):
                contender()
            samples[name].append((clock.now_ns() - begin_ns) / calls[name])
        after_turn()
    return {name: Timing(tuple(samples[name]), calls[name]) for name in contenders}


def _calls_per_sample(contender: Callable[[], object], clock: Clock, effort: Effort) -> int:
    for _ in range(_WARM_UP_CALLS):
        contender()
    begin_ns = clock.now_ns()
    contender()
    call_ns = max(1, clock.now_ns() - begin_ns)
    return max(1, min(1000, effort.sample_ns // call_ns))


def time_enqueue(
    call: Callable[[], object],
    synchronize: Callable[[], object],
    clock: Clock,
    effort: Effort,
    after_turn: Callable[[], object] = lambda: None,
) -> tuple[Timing, Timing]:
    """Time a call that queues work: until it returns, and until the device is done.

    One call per sample, begun on an idle device: many in a row fill the device's queue, and the
    host then waits for the device inside the call. `after_turn` is called after each sample.

    Returns:
        The time until the call returned, and until the device was done; by sample.
    """
    for _ in range(_WARM_UP_CALLS):
        call()
    enqueue: list[float] = []
    total: list[float] = []
    deadline_ns = clock.now_ns() + effort.budget_ns
    for turn in range(effort.turns):
        if turn >= effort.least_turns and clock.now_ns() > deadline_ns:
            break
        synchronize()
        begin_ns = clock.now_ns()
        call()
        enqueue.append(clock.now_ns() - begin_ns)
        synchronize()
        total.append(clock.now_ns() - begin_ns)
        after_turn()
    return Timing(tuple(enqueue), 1), Timing(tuple(total), 1)
