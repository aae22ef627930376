"""Claim: the planner's arenas are within 2 % of the lower bound.

The lower bound is the most bytes alive at once; no placement has fewer. The portfolio of greedy
orders without the search is also shown. Planning is timed against computing the bound.
"""

from __future__ import annotations

import csv
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload
from headers import executable
from measurements import Case, counted_ratio, figure_of, ratio_of
from models import MODELS
from offload.plan import Interval, check_placement, place_intervals
from offload.plan.memory import lower_bound_bytes
from turns import take_turns

INSTANCES = Path(__file__).parents[1] / "tests" / "data" / "minimalloc"


def minimalloc(name: str) -> list[Interval]:
    """An instance of MiniMalloc; its capacity can be met."""
    with next(INSTANCES.glob(f"{name}.*.csv")).open(newline="") as lines:
        return [
            Interval(int(row["lower"]), int(row["upper"]), int(row["size"]))
            for row in csv.DictReader(lines)
        ]


def unrolled(n: int) -> list[Interval]:
    """Short lifetimes in sequence, as in a long unrolled network."""
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


CASES: dict[str, tuple[str, Callable[[], list[Interval]], int]] = {
    **{
        name: (f"MiniMalloc {name}", functools.partial(minimalloc, name), 1)
        for name in ("A", "C", "E", "G", "I", "K")
    },
    "unrolled": ("unrolled, 10,000 values", functools.partial(unrolled, 10_000), 64),
    "crowded": ("crowded, 10,000 values", functools.partial(crowded, 10_000), 64),
}


@pytest.mark.parametrize("name", CASES)
def test_placement(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    title, make, alignment_bytes = CASES[name]
    intervals = make()
    bound = lower_bound_bytes(intervals, alignment_bytes)

    def place(search_steps: int | None = None) -> Any:
        options = {} if search_steps is None else {"search_steps": search_steps}
        return place_intervals(intervals, alignment_bytes=alignment_bytes, **options)

    greedy, placement = place(0), place()
    for one in (greedy, placement):
        check_placement(intervals, one.offsets_bytes)
    times = take_turns(
        {
            "bound": lambda: lower_bound_bytes(intervals, alignment_bytes),
            "greedy": lambda: place(0),
            "planner": place,
        },
        rounds=9,
        round_ns=5_000_000,
    )
    record(
        Case(
            title,
            ratios={
                "lower bound": counted_ratio(bound, placement.arena_bytes, at_least=0.98),
                "lower bound, greedy alone": counted_ratio(bound, greedy.arena_bytes),
                "time to compute the bound": ratio_of(times["bound"], times["planner"]),
            },
            figures={one: figure_of([ns / 1e6 for ns in times[one]], "ms") for one in times},
        )
    )
    benchmark.pedantic(place, rounds=3)


@pytest.mark.parametrize("name", ["gpt_stack", "minilm"])
def test_program(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    title, make = MODELS[name]
    model, inputs = make()
    run: offload.Executable = executable(model, inputs)
    plan = run.plan
    record(
        Case(
            title,
            ratios={
                "lower bound": counted_ratio(
                    plan.lower_bound_bytes, plan.feature_map_bytes, at_least=0.98
                )
            },
        )
    )
    benchmark.pedantic(run, args=inputs, rounds=5)
