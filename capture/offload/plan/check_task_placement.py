"""Checks any placement of tasks. Shares no code with any planner."""

from __future__ import annotations

import itertools
import math

from offload.errors import PlanError
from offload.plan.task_placement import Objective, TaskPlacement

_ROUNDING = 1e-9
"""The tolerance of sums of floating-point numbers: energy, and its bounds."""


def check_task_placement(placement: TaskPlacement) -> None:
    """Prove that tasks can run as placed, and that the placement's figures are right.

    Raises:
        PlanError: a task has no processor, or a processor that cannot run it; its duration differs
            from its cost; it begins before its inputs are there; two tasks of a processor overlap;
            the tasks of a processor take more memory than it has; the latency, period or energy is
            wrong, exceeds the limit, or is below the lower bound. The message names them.
    """
    _check_tasks(placement)
    _check_order(placement)
    _check_processors(placement)
    _check_figures(placement)


def _name(placement: TaskPlacement, task: int) -> str:
    return f"task {task} ({placement.graph.tasks[task].name})"


def _check_tasks(placement: TaskPlacement) -> None:
    n_tasks = len(placement.graph.tasks)
    columns = (placement.processors, placement.begin_ns, placement.end_ns)
    if any(len(one) != n_tasks for one in columns):
        raise PlanError(f"expected a processor, a begin and an end of each of {n_tasks} tasks")
    for task, (processor, begin_ns, end_ns) in enumerate(zip(*columns, strict=True)):
        costs = placement.graph.tasks[task].costs_ns
        cost_ns = costs[processor] if 0 <= processor < len(costs) else None
        if cost_ns is None:
            raise PlanError(
                f"{_name(placement, task)} is placed on processor {processor}, which cannot run it"
            )
        if begin_ns < 0 or end_ns - begin_ns != cost_ns:
            raise PlanError(
                f"{_name(placement, task)} takes {cost_ns} ns, and runs from {begin_ns} to {end_ns}"
            )


def _check_order(placement: TaskPlacement) -> None:
    for edge in placement.graph.edges:
        origin, target = (placement.processors[one] for one in (edge.producer, edge.consumer))
        took_ns = _transfer_ns(placement, edge.size_bytes, origin, target)
        arrives_ns = placement.end_ns[edge.producer] + took_ns
        if placement.begin_ns[edge.consumer] < arrives_ns:
            raise PlanError(
                f"{_name(placement, edge.consumer)} begins at {placement.begin_ns[edge.consumer]} "
                f"ns, and what it reads of {_name(placement, edge.producer)} is there at "
                f"{arrives_ns}"
            )


def _transfer_ns(placement: TaskPlacement, size_bytes: int, origin: int, target: int) -> int:
    if origin == target:
        return 0
    link = placement.graph.links[origin, target]
    return math.ceil(link.overhead_ns + size_bytes * 1e9 / link.bytes_per_second)


def _check_processors(placement: TaskPlacement) -> None:
    queues: list[list[tuple[int, int, int]]] = [[] for _ in placement.graph.processors]
    taken_bytes = [0] * len(queues)
    for task, at in enumerate(placement.processors):
        queues[at].append((placement.begin_ns[task], placement.end_ns[task], task))
        taken_bytes[at] += placement.graph.tasks[task].memory_bytes
    for index, processor in enumerate(placement.graph.processors):
        for (_, end_ns, one), (begin_ns, _, other) in itertools.pairwise(sorted(queues[index])):
            if begin_ns < end_ns:
                raise PlanError(
                    f"{_name(placement, other)} begins at {begin_ns} ns on {processor.name}, which "
                    f"runs {_name(placement, one)} until {end_ns}"
                )
        if processor.memory_bytes is not None and taken_bytes[index] > processor.memory_bytes:
            raise PlanError(
                f"tasks on {processor.name} take {taken_bytes[index]} bytes of "
                f"{processor.memory_bytes}"
            )


def _check_figures(placement: TaskPlacement) -> None:
    latency_ns = max(placement.end_ns, default=0)
    if placement.latency_ns != latency_ns:
        raise PlanError(f"the latency is {latency_ns} ns, not {placement.latency_ns}")
    loads_ns: dict[object, int] = {}
    for task, at in enumerate(placement.processors):
        took_ns = placement.end_ns[task] - placement.begin_ns[task]
        loads_ns[at] = loads_ns.get(at, 0) + took_ns
    energy_nj = 0.0
    for index, processor in enumerate(placement.graph.processors):
        busy_ns = loads_ns.get(index, 0)
        energy_nj += busy_ns * processor.busy_watts + (latency_ns - busy_ns) * processor.idle_watts
    for edge in placement.graph.edges:
        link = (placement.processors[edge.producer], placement.processors[edge.consumer])
        took_ns = _transfer_ns(placement, edge.size_bytes, *link)
        loads_ns[link] = loads_ns.get(link, 0) + took_ns
    period_ns = max(loads_ns.values(), default=0)
    if placement.period_ns != period_ns:
        raise PlanError(f"the period is {period_ns} ns, not {placement.period_ns}")
    if not math.isclose(placement.energy_nj, energy_nj, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        raise PlanError(f"the energy is {energy_nj} nJ, not {placement.energy_nj}")
    limit_ns = placement.latency_limit_ns
    if (limit_ns is None) == (placement.objective is Objective.ENERGY) or (
        limit_ns is not None and latency_ns > limit_ns
    ):
        raise PlanError(f"the latency is {latency_ns} ns, and its limit {limit_ns}")
    if placement.lower_bound > placement.value * (1 + _ROUNDING):
        raise PlanError(
            f"the value is {placement.value}, below its lower bound of {placement.lower_bound}"
        )
