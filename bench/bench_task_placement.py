"""Claim: tasks are placed and launches put on lanes in 10 ms.

500 tasks on 4 processors with 1,000 evaluations; at the limit of the search, 150 ms. 1,000 launches
on 4 lanes. Also shown: the ratio of the best heuristic's makespan, and the distance to the lower
bound.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from measurements import Case, counted_figure, counted_ratio, figure_of, ratio_of
from offload.plan.check_task_placement import check_task_placement
from offload.plan.lane_schedule import LaneSchedule, schedule_lanes
from offload.plan.task_graph import Edge, Processor, Task, TaskGraph
from offload.plan.task_placement import TaskPlacement, place_tasks
from offload.plan.topology import Link
from turns import take_single_turns

ROUNDS = 15


def tasks_in_a_band(n_tasks: int, n_processors: int) -> TaskGraph:
    """Each task reads one to four of the last hundred or so; transfers take as long as tasks."""
    draw = random.Random(5)
    pairs = {
        (max(0, task - 1 - int(draw.expovariate(1 / 20))), task)
        for task in range(1, n_tasks)
        for _ in range(draw.randint(1, 4))
    }
    base = [100 * draw.randint(10, 100) for _ in range(n_tasks)]
    return TaskGraph(
        tuple(
            Task(
                f"T{index}", tuple(round(one * draw.uniform(0.5, 1.5)) for _ in range(n_processors))
            )
            for index, one in enumerate(base)
        ),
        tuple(Edge(*pair, round(5_500 * draw.uniform(0.5, 1.5))) for pair in sorted(pairs)),
        tuple(Processor(f"P{index}") for index in range(n_processors)),
        {pair: Link(1e9, 0) for pair in itertools.permutations(range(n_processors), 2)},
    )


@pytest.mark.parametrize(("max_evaluations", "limit_ms"), [(1_000, 10), (20_000, 150)])
def test_tasks(
    benchmark: Any, record: Callable[[Case], None], max_evaluations: int, limit_ms: float
) -> None:
    graph = tasks_in_a_band(500, 4)

    def place(evaluations: int = max_evaluations) -> TaskPlacement:
        return place_tasks(graph, max_evaluations=evaluations)

    found, portfolio = place(), place(0)
    check_task_placement(found)
    times = take_single_turns({"placed": place, "portfolio": lambda: place(0)}, rounds=ROUNDS)
    record(
        Case(
            f"500 tasks, 4 processors, {max_evaluations:,} evaluations",
            ratios={
                f"{limit_ms:g} ms": ratio_of(
                    [limit_ms * 1e6] * ROUNDS, times["placed"], at_least=1.0
                ),
                "the portfolio's latency": counted_ratio(
                    portfolio.latency_ns, found.latency_ns, of="latency", at_least=1.0
                ),
                "the lower bound": counted_ratio(found.lower_bound, found.latency_ns, of="latency"),
            },
            figures={
                **{one: figure_of([ns / 1e6 for ns in times[one]], "ms") for one in times},
                "latency": counted_figure(found.latency_ns, "ns"),
            },
        )
    )
    benchmark.pedantic(place, rounds=3)


def branches(n_launches: int) -> tuple[list[float], list[tuple[int, int]]]:
    """Launches of a network with branches: blocks of four that a join ends."""
    draw = random.Random(1)
    costs = [float(draw.randint(2_000, 20_000)) for _ in range(n_launches)]
    conflicts = []
    for launch in range(1, n_launches):
        block, place = divmod(launch, 9)
        join = block * 9
        if place == 0:
            conflicts += [(launch - one, launch) for one in (1, 2, 3, 4)]
        else:
            conflicts.append((join if place <= 4 else launch - 4, launch))
    return costs, conflicts


def test_lanes(benchmark: Any, record: Callable[[Case], None]) -> None:
    costs, conflicts = branches(1_000)

    def plan() -> LaneSchedule:
        return schedule_lanes(costs, conflicts, 4, synchronisation_ns=1_000.0)

    found = plan()
    times = take_single_turns({"planned": plan}, rounds=ROUNDS)
    record(
        Case(
            "1,000 launches, 4 lanes",
            ratios={
                "10 ms": ratio_of([10e6] * ROUNDS, times["planned"], at_least=1.0),
                "one lane, predicted": counted_ratio(
                    found.sequential_ns, found.predicted_ns, of="time"
                ),
            },
            figures={
                "planned": figure_of([ns / 1e6 for ns in times["planned"]], "ms"),
                "waits": counted_figure(found.n_waits, "waits"),
            },
        )
    )
    benchmark.pedantic(plan, rounds=3)
