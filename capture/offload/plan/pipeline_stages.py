"""Cuts a Program's tasks, in recorded order, into pipeline stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from offload.errors import PlanError
from offload.plan.program_tasks import ProgramTasks
from offload.plan.simulate_steps import simulate_steps
from offload.plan.steps import Lane, LaneKind, Record, Run, Step, Wait
from offload.plan.task_placement import Objective, place_tasks
from offload.plan.topology import Link
from offload.program import Program, Role


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStages:
    """Consecutive stages, each of which runs on a rank.

    Attributes:
        launches: of each stage, in recorded order.
        stage_ns: the duration of each stage's launches for one micro-batch.
        received_ns: the longest time of each stage to receive results of earlier stages.
        n_micro_batches: micro-batches of one call.
        predicted_ns: of a call, by simulation of its Steps.
        sequential_ns: of all launches for all micro-batches on one rank.
        lower_bound_ns: of a micro-batch; no placement on as many processors has a shorter period.
    """

    launches: tuple[tuple[int, ...], ...]
    stage_ns: tuple[float, ...]
    received_ns: tuple[float, ...]
    n_micro_batches: int
    predicted_ns: float
    sequential_ns: float
    lower_bound_ns: float

    @property
    def period_ns(self) -> float:
        """The time of the slowest stage for a micro-batch."""
        return max(map(sum, zip(self.stage_ns, self.received_ns, strict=True)))


def cut_stages(
    program: Program, tasks: ProgramTasks, link: Link, n_stages: int, n_micro_batches: int
) -> PipelineStages:
    """Cut tasks so that the slowest stage is as short as possible.

    All cuts are tried, by dynamic programming over the position of the last one (linear partition;
    S. Skiena, "The Algorithm Design Manual", section on dynamic programming). The cost of a stage
    is that of its launches and of the transfer of all data that cross the cut before it.

    Args:
        program: the Program of the tasks' launches.
        tasks: in recorded order, each with a cost on the first processor.
        link: between two stages.
        n_stages: at least 1.
        n_micro_batches: at least 1.

    Raises:
        PlanError: there are fewer tasks than stages.
    """
    graph = tasks.graph
    n_tasks = len(graph.tasks)
    if n_tasks < n_stages:
        raise PlanError(
            f"expected at least {n_stages} tasks for {n_stages} stages, got {n_tasks}: launches "
            "that belong together are one task"
        )
    costs_ns = [float(one.costs_ns[0] or 0) for one in graph.tasks]
    received_ns = _received_ns(program, tasks, link)
    cuts = best_cuts(costs_ns, received_ns, n_stages)
    bounds = list(itertools.pairwise((0, *cuts, n_tasks)))
    stage_ns = tuple(sum(costs_ns[first:last]) for first, last in bounds)
    crossing_ns = tuple(received_ns[first] for first, _ in bounds)
    placed = place_tasks(graph, objective=Objective.THROUGHPUT)
    return PipelineStages(
        launches=tuple(
            tuple(launch for task in range(first, last) for launch in tasks.launches[task])
            for first, last in bounds
        ),
        stage_ns=stage_ns,
        received_ns=crossing_ns,
        n_micro_batches=n_micro_batches,
        predicted_ns=_predicted_ns(stage_ns, crossing_ns, n_micro_batches),
        sequential_ns=sum(costs_ns) * n_micro_batches,
        lower_bound_ns=placed.lower_bound,
    )


def _received_ns(program: Program, tasks: ProgramTasks, link: Link) -> list[float]:
    """By task, the transfer time of data that cross a cut before it; 0 before the first."""
    n_tasks = len(tasks.launches)
    task_of = {launch: task for task, of in enumerate(tasks.launches) for launch in of}
    spans = {view.value: (0, 0) for view in program.inputs}  # by Value, its maker and last reader
    for launch in program.launches:
        task = task_of[launch.index]
        for value in launch.touched():
            if program.values[value].role is not Role.WEIGHT:
                maker, last = spans.get(value, (task, task))
                spans[value] = maker, max(last, task)
    for result in program.results:
        value = result.view.value
        spans[value] = spans.get(value, (0, 0))[0], n_tasks - 1
    more_bytes = [0] * (n_tasks + 1)  # crossing bytes beyond those at the cut before
    for value, (maker, last) in spans.items():
        more_bytes[maker + 1] += program.values[value].size_bytes
        more_bytes[last + 1] -= program.values[value].size_bytes
    crossing_bytes = list(itertools.accumulate(more_bytes))[:n_tasks]
    return [
        0.0 if at == 0 else link.overhead_ns + size_bytes / link.bytes_per_second * 1e9
        for at, size_bytes in enumerate(crossing_bytes)
    ]


def best_cuts(
    costs_ns: Sequence[float], received_ns: Sequence[float], n_stages: int
) -> tuple[int, ...]:
    """The first task of each stage except the first, where the slowest stage is shortest.

    Args:
        costs_ns: of each task.
        received_ns: of receiving what crosses a cut before each task.
        n_stages: at least 1, and at most the number of tasks.
    """
    n_tasks = len(costs_ns)
    before = [0.0, *itertools.accumulate(costs_ns)]
    infinite = float("inf")
    # By number of tasks, the slowest of the stages cut so far, and the begin of the last stage.
    slowest = [0.0] + [infinite] * n_tasks
    begins: list[list[int]] = []
    for stage in range(n_stages):
        found, begin = [infinite] * (n_tasks + 1), [0] * (n_tasks + 1)
        for last in range(stage + 1, n_tasks + 1):
            for first in range(last - 1, stage - 1, -1):
                here = before[last] - before[first] + received_ns[first]
                if here >= found[last] and before[last] - before[first] >= found[last]:
                    break  # stages that begin earlier have more launches
                value = max(slowest[first], here)
                if value < found[last]:
                    found[last], begin[last] = value, first
        slowest = found
        begins.append(begin)
    cuts: list[int] = []
    last = n_tasks
    for begin in reversed(begins):
        last = begin[last]
        cuts.append(last)
    return tuple(reversed(cuts[:-1]))


def _predicted_ns(
    stage_ns: Sequence[float], received_ns: Sequence[float], n_micro_batches: int
) -> float:
    """Simulate a call with a lane for each stage, which receives a micro-batch and runs it."""
    n_stages = len(stage_ns)
    done = n_stages * n_micro_batches
    lanes = []
    for stage in range(n_stages):
        steps: list[Step] = [] if stage == n_stages - 1 else [Wait(done, age=1)]
        for batch in range(n_micro_batches):
            run = batch * n_stages + stage
            if stage:
                steps.append(Wait(run - 1))
            steps += [Run(run, run + 1), Record(run)]
        if stage == n_stages - 1:
            steps.append(Record(done))
        lanes.append(Lane(LaneKind.LAUNCHES, tuple(steps)))
    costs_ns = [sum(one) for one in zip(stage_ns, received_ns, strict=True)] * n_micro_batches
    return simulate_steps(lanes, costs_ns, ()).period_ns
