"""Claim: 10,000 values are planned in under a second."""

from __future__ import annotations

import random
from typing import Any

import pytest

from offload.passes import Interval, place_intervals


def unrolled(n: int) -> list[Interval]:
    """Short lifetimes one after the other, as a long unrolled network has them."""
    draw = random.Random(1)
    return [
        Interval(step, step + 1 + draw.randrange(1, 8), 64 * draw.randrange(1, 200))
        for step in range(n)
    ]


def crowded(n: int) -> list[Interval]:
    """Long lifetimes that mostly overlap."""
    draw = random.Random(2)
    intervals = []
    for _ in range(n):
        first = draw.randrange(n)
        intervals.append(Interval(first, first + draw.randrange(1, n), 64 * draw.randrange(1, 200)))
    return intervals


@pytest.mark.parametrize("make", [unrolled, crowded])
def test_ten_thousand_values(benchmark: Any, make: Any) -> None:
    intervals = make(10_000)
    placement = benchmark.pedantic(
        place_intervals, args=(intervals,), kwargs={"alignment_bytes": 64}, rounds=3
    )
    ratio = placement.arena_bytes / placement.lower_bound_bytes
    benchmark.extra_info["arena_over_lower_bound"] = ratio
