"""Times contenders in turns, so that disturbances of the machine affect all of them equally."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def take_turns(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 60,
    round_ns: int = 2_000_000,
    lead_ns: int = 0,
) -> dict[str, list[float]]:
    """Time calls of each contender.

    In each round all contenders have their turn, in a random order. A turn is one untimed call,
    which finds the caches as the others left them, or as many as take `lead_ns`, where threads of
    the preceding contender may still spin; and then as many calls as take about `round_ns`.

    Returns:
        By contender, for each round the time of one call in ns.
    """
    calls = {name: _calls_for(function, round_ns) for name, function in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(sorted(contenders), len(contenders)):
            function, n_calls = contenders[name], calls[name]
            lead_end_ns = time.perf_counter_ns() + lead_ns
            function()
            while time.perf_counter_ns() < lead_end_ns:
                function()
            begin = time.perf_counter_ns()
            for _ in range(n_calls):
                function()
            times[name].append((time.perf_counter_ns() - begin) / n_calls)
    return times


def take_single_turns(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    few_rounds: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """As `take_turns`, for long calls: a turn is one call, and the caller has called each before.

    Those in `few_rounds` take part only in this many first rounds.
    """
    few_rounds = few_rounds or {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for step in range(rounds):
        present = sorted(name for name in contenders if step < few_rounds.get(name, rounds))
        for name in draw.sample(present, len(present)):
            begin = time.perf_counter_ns()
            contenders[name]()
            times[name].append(float(time.perf_counter_ns() - begin))
    return times


def user_calls(
    call: Callable[..., Any], inputs: Sequence[Any], buffers: Sequence[Any]
) -> Callable[[], Any]:
    """Calls as in a user's loop, with the next input and buffer each time.

    The overhead of a call is Python's cost of calling a function without arguments.
    """
    if len(inputs) == 1:
        [x], [y] = inputs, buffers
        return lambda: call(x, out=y)
    pairs = itertools.cycle(zip(inputs, buffers, strict=True))

    def one() -> Any:
        x, y = next(pairs)
        return call(x, out=y)

    return one


def _calls_for(function: Callable[[], Any], round_ns: int) -> int:
    """The number of calls that take about `round_ns`, from the fastest of five."""
    quickest = round_ns
    for _ in range(5):
        begin = time.perf_counter_ns()
        function()
        quickest = min(quickest, time.perf_counter_ns() - begin)
    return max(1, round_ns // max(quickest, 1))
