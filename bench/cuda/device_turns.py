"""Times contenders on a GPU in turns: the host's time, or all until the device is done."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Fewer launches than the driver queues before it blocks the host.
CALLS = 20

# For longer calls, one call per turn is as informative as many.
TURN_NS = 200_000_000

# All benchmarks of a GPU share a few minutes. Longer ones have fewer rounds, but no fewer than an
# interval of the median needs (`measurements.median_interval`), with a margin.
TURNS_NS = 5_000_000_000
LEAST_ROUNDS = 12


def host_turns(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 60, calls: int = CALLS
) -> dict[str, list[float]]:
    """By contender, for each round the host's ns for one call; the device is idle before a turn.

    Long calls have fewer rounds, at least `LEAST_ROUNDS`.
    """
    return _turns(contenders, rounds, calls, until_done=False)


def device_turns(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 40, calls: int = CALLS
) -> dict[str, list[float]]:
    """By contender, for each round the ns of one call, until the device has done all of a turn.

    Long calls have fewer rounds, at least `LEAST_ROUNDS`.
    """
    return _turns(contenders, rounds, calls, until_done=True)


def _turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, calls: int, *, until_done: bool
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    n_calls = {name: _calls_in_a_turn(call, calls) for name, call in contenders.items()}
    draw = random.Random(0)
    deadline = time.perf_counter_ns() + TURNS_NS
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.perf_counter_ns() > deadline:
            break
        for name in draw.sample(sorted(contenders), len(contenders)):
            call = contenders[name]
            call()
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(n_calls[name]):
                call()
            if until_done:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter_ns() - begin) / n_calls[name])
            torch.cuda.synchronize()
    return times


def _calls_in_a_turn(call: Callable[[], Any], calls: int) -> int:
    """The wanted number of calls, fewer where they would take long."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    call()
    torch.cuda.synchronize()
    return max(1, min(calls, TURN_NS // max(1, time.perf_counter_ns() - begin)))
