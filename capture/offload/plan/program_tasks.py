"""Divides a Program into tasks that may run on several processors."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from offload.errors import PlanError
from offload.plan.launch_conflicts import launch_conflicts
from offload.plan.task_graph import Edge, Processor, Task, TaskGraph
from offload.plan.topology import Link
from offload.program import MADE_ROLES, Launch, Program, Role, span_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramTasks:
    """A Program's launches as tasks.

    Attributes:
        graph: the tasks to place.
        launches: of each task, in recorded order; empty for tasks that represent the caller.
    """

    graph: TaskGraph
    launches: tuple[tuple[int, ...], ...]


def program_tasks(
    program: Program,
    costs_ns: Sequence[Sequence[float | None]],
    processors: Sequence[Processor],
    links: Mapping[tuple[int, int], Link],
    home: int,
    *,
    has_ends: bool = False,
    counts_values: bool = False,
) -> ProgramTasks:
    """Divide a Program into the smallest tasks that processors may share.

    A Value that is written more than once is made and written within one task: launches from the
    first that touches it to the last that writes it. Launches that draw random numbers, may end the
    execution, do unseen work, or use an input or a weight that is written stay where the caller's
    memory and generators are. All others may run wherever they have a cost.

    Args:
        program: of observed launches.
        costs_ns: for each launch its cost on each processor; None: that processor cannot run it.
        processors: the processors.
        links: the costs of transfers between them.
        home: the processor with the caller's memory.
        has_ends: two tasks without launches are added at the end and stay there: one gives the
            inputs, one takes the results. For processors with separate memory.
        counts_values: the memory of a task is that of all Values that it uses, as if each lived
            throughout: an upper bound. Otherwise that of its weights: a lower bound.

    Raises:
        PlanError: costs of launches are missing, or a launch that stays has no cost at home.
    """
    if len(costs_ns) != len(program.launches):
        raise PlanError(f"expected costs of {len(program.launches)} launches, got {len(costs_ns)}")
    groups = task_launches(program)
    stays = staying_launches(program)
    tasks = []
    for group in groups:
        costs = [_sum(costs_ns[launch][one] for launch in group) for one in range(len(processors))]
        if not stays.isdisjoint(group):
            costs = [cost if one == home else None for one, cost in enumerate(costs)]
        memory_bytes = _memory_bytes(program, group, counts_values=counts_values)
        tasks.append(Task(_name(program, group), tuple(costs), memory_bytes))
        if all(cost is None for cost in costs):
            where = "" if stays.isdisjoint(group) else f", which stays on {processors[home].name}"
            raise PlanError(f"no processor can run {tasks[-1].name}{where}")
    edges = _edges(program, groups)
    if has_ends:
        at_home = tuple(0 if one == home else None for one in range(len(processors)))
        tasks += [Task("inputs", at_home), Task("results", at_home)]
        edges += _end_edges(program, groups)
        groups += [(), ()]
    graph = TaskGraph(tuple(tasks), edges, tuple(processors), links)
    return ProgramTasks(graph, tuple(groups))


def task_launches(program: Program) -> list[tuple[int, ...]]:
    """Launches in recorded order, cut wherever nothing that belongs together is split."""
    ends = list(range(len(program.launches)))  # by launch, the last launch that belongs to it
    first: dict[int, int] = {}
    for launch in program.launches:
        for value in launch.touched():
            begin = first.setdefault(value, launch.index)
            if _belongs(program, value, launch, begin):
                ends[begin] = max(ends[begin], launch.index)
    groups: list[tuple[int, ...]] = []
    begin = end = 0
    for index in range(len(ends)):
        if index > end:
            groups.append(tuple(range(begin, end + 1)))
            begin = index
        end = max(end, ends[index])
    if ends:
        groups.append(tuple(range(begin, end + 1)))
    return groups


def _belongs(program: Program, value: int, launch: Launch, begin: int) -> bool:
    """Whether a launch must be in one task with the first that touched the Value."""
    one = program.values[value]
    if one.role not in MADE_ROLES or launch.index == begin:
        return False
    is_part = span_bytes(one.shape, one.strides, one.dtype) != one.size_bytes
    return value in launch.writes or is_part


def staying_launches(program: Program) -> set[int]:
    """Launches that must run where the caller's memory and generators are."""
    visible = {
        value
        for launch in program.launches
        for value in launch.writes
        if program.values[value].role not in MADE_ROLES
    }
    shared = {program.inputs[leaf].value for o in program.overlaps for leaf in (o.first, o.second)}
    tied = visible | shared
    return {
        launch.index
        for launch in program.launches
        if launch.effects or not tied.isdisjoint(launch.touched())
    }


def _edges(program: Program, groups: Sequence[tuple[int, ...]]) -> tuple[Edge, ...]:
    """Edges of what tasks read from one another, and of further order between them."""
    begins = [group[0] for group in groups]

    def task_of(launch: int) -> int:
        return bisect.bisect_right(begins, launch) - 1

    found = {
        (task_of(one), task_of(other)): 0
        for one, other in launch_conflicts(program)
        if task_of(one) != task_of(other)
    }
    first: dict[int, int] = {}
    taken: set[tuple[int, int]] = set()  # pairs of a Value and a task that has it
    for launch in program.launches:
        for value in launch.touched():
            begin = task_of(first.setdefault(value, launch.index))
            task = task_of(launch.index)
            one = program.values[value]
            if one.role in MADE_ROLES and begin != task and (value, task) not in taken:
                taken.add((value, task))
                found[begin, task] = found.get((begin, task), 0) + one.size_bytes
    return tuple(Edge(*pair, size_bytes) for pair, size_bytes in sorted(found.items()))


def _end_edges(program: Program, groups: Sequence[tuple[int, ...]]) -> tuple[Edge, ...]:
    """Edges of inputs that tasks read, and of results that they make."""
    given = {view.value for view in program.inputs}
    seen = {result.view.value for result in program.results}
    found = []
    made: set[int] = set()
    for task, group in enumerate(groups):
        used = {value for launch in group for value in program.launches[launch].touched()}
        begun = {value for value in used - made if program.values[value].role in MADE_ROLES}
        made |= begun
        read_bytes = sum(program.values[value].size_bytes for value in used & given)
        result_bytes = sum(program.values[value].size_bytes for value in begun & seen)
        if used & given:
            found.append(Edge(len(groups), task, read_bytes))
        if begun & seen:
            found.append(Edge(task, len(groups) + 1, result_bytes))
    return tuple(found)


def _sum(costs: Iterable[float | None]) -> int | None:
    total = 0.0
    for cost in costs:
        if cost is None:
            return None
        total += cost
    return round(total)


def _memory_bytes(program: Program, group: Sequence[int], *, counts_values: bool) -> int:
    used = {value for launch in group for value in program.launches[launch].touched()}
    values = (program.values[value] for value in used)
    return sum(one.size_bytes for one in values if counts_values or one.role is Role.WEIGHT)


def _name(program: Program, group: Sequence[int]) -> str:
    first = program.launches[group[0]]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{first.index}: {first.name}{more}"
