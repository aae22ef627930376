"""Places tasks on processors. The work is done in native/plan/task_*.cpp."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from offload.errors import PlanError
from offload.native import _planner
from offload.plan.task_graph import TaskGraph

DEFAULT_EVALUATIONS = _planner.DEFAULT_EVALUATIONS
"""The limit of a search for a graph of up to 500 tasks."""

_CANNOT_RUN = _NO_LIMIT = -1
_EDGES_PER_TASK = 8  # placing a task takes as long as reading so many edges
_NO_LINK = (0.0, 1.0)  # from a processor to itself, which is not read


class Objective(enum.StrEnum):
    """The quantity to minimise."""

    LATENCY = "latency"  # ns from the first task's begin to the last task's end
    THROUGHPUT = "throughput"  # ns per input of a stream: the busiest processor's or link's
    ENERGY = "energy"  # nJ of one input, within a slowdown

    @property
    def unit(self) -> str:
        """The unit of its values."""
        return "nJ" if self is Objective.ENERGY else "ns"


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerUp:
    """The outcome with the best other processor.

    Attributes:
        processor: that processor.
        value: the objective's value, if all else keeps its place and order.
    """

    processor: int
    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tasks on one processor, of which only the first waits for another processor.

    Other processors read only results of the last task.
    """

    processor: int
    tasks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TaskPlacement:
    """The processor and time of each task.

    Attributes:
        graph: the tasks that were placed.
        objective: the quantity that was minimised.
        processors: of each task.
        begin_ns, end_ns: of each task, for a single input.
        latency_ns: when the last task ends.
        period_ns: for a stream of inputs, the time per input of the busiest processor or link. It
            requires `latency_ns / period_ns` inputs in flight.
        energy_nj: of one input, including idle processors up to the end.
        lower_bound: no placement has a smaller value.
        method: how it was found: one of the candidates, or `search`.
        n_evaluations: placements that the search evaluated.
        latency_limit_ns: for energy, the longest latency that the slowdown allows.
        candidates: the heuristics' placements: method and value.
    """

    graph: TaskGraph
    objective: Objective
    processors: tuple[int, ...]
    begin_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    latency_ns: int
    period_ns: int
    energy_nj: float
    lower_bound: float
    method: str
    n_evaluations: int
    latency_limit_ns: int | None
    candidates: tuple[tuple[str, float], ...]

    @property
    def value(self) -> float:
        """The objective's value: latency or period in ns, or energy in nJ."""
        values: dict[Objective, float] = {
            Objective.LATENCY: self.latency_ns,
            Objective.THROUGHPUT: self.period_ns,
            Objective.ENERGY: self.energy_nj,
        }
        return values[self.objective]

    def order(self) -> tuple[int, ...]:
        """Tasks in the order in which processors begin them, each after its inputs."""
        behind: list[list[int]] = [[] for _ in self.processors]
        n_before = [0] * len(self.processors)
        for edge in self.graph.edges:
            behind[edge.producer].append(edge.consumer)
            n_before[edge.consumer] += 1
        depth = [0] * len(self.processors)  # distinguishes tasks without duration
        ready = [task for task, count in enumerate(n_before) if not count]
        for task in ready:  # it grows during iteration
            for one in behind[task]:
                depth[one] = max(depth[one], depth[task] + 1)
                n_before[one] -= 1
                if not n_before[one]:
                    ready.append(one)
        return tuple(
            sorted(ready, key=lambda one: (self.begin_ns[one], self.end_ns[one], depth[one]))
        )

    def runners_up(self) -> tuple[RunnerUp | None, ...]:
        """For each task the best other processor.

        None if no other can run it, has the memory, or is fast enough for the least energy.
        """
        return self.runners_up_of([(task,) for task in range(len(self.processors))])

    def runners_up_of(self, groups: Sequence[Sequence[int]]) -> tuple[RunnerUp | None, ...]:
        """For each group of tasks on one processor, the best other processor for all together.

        Raises:
            PlanError: a group has no task, or a task that does not exist.
        """
        tasks = range(len(self.processors))
        for group in groups:
            if not group or any(task not in tasks for task in group):
                raise PlanError(f"expected a group of some of {len(tasks)} tasks, got {group}")
        costs = _planner.moved_costs(
            *_columns(self.graph),
            objective=_NUMBERS[self.objective],
            processors=_integers(self.processors, "processors"),
            order=_integers(self.order(), "tasks"),
            groups=[list(one) for one in groups],
            latency_limit_ns=_NO_LIMIT if self.latency_limit_ns is None else self.latency_limit_ns,
        )
        n_processors = len(self.graph.processors)
        found: list[RunnerUp | None] = []
        for index, group in enumerate(groups):
            row = costs[index * n_processors : (index + 1) * n_processors]
            others = [
                RunnerUp(processor, value)
                for processor, value in enumerate(row)
                if value >= 0 and processor != self.processors[group[0]]
            ]
            found.append(min(others, key=lambda one: one.value, default=None))
        return tuple(found)

    def segments(self) -> tuple[Segment, ...]:
        """All tasks, in the order in which segments begin."""
        waits, is_sent = set(), set()
        for edge in self.graph.edges:
            if self.processors[edge.producer] != self.processors[edge.consumer]:
                waits.add(edge.consumer)
                is_sent.add(edge.producer)
        found: list[list[int]] = []
        at: dict[int, list[int]] = {}
        for task in self.order():
            row = at.get(self.processors[task])
            if row is None or task in waits or row[-1] in is_sent:
                row = at[self.processors[task]] = []
                found.append(row)
            row.append(task)
        return tuple(Segment(self.processors[row[0]], tuple(row)) for row in found)

    def explain(self) -> str:
        """Explain where each segment is, why, and what the runner-up would have cost."""
        from offload.plan.task_placement_text import explain_lines  # noqa: PLC0415 - it reads this

        return "\n".join(explain_lines(self))

    def to_dot(self) -> str:
        """The graph for Graphviz: a box for each processor, transfers between them."""
        from offload.plan.task_placement_text import dot_lines  # noqa: PLC0415 - it reads this

        return "\n".join(dot_lines(self))


def default_evaluations(graph: TaskGraph) -> int:
    """The default number of evaluations: fewer for more than 500 tasks or 4,000 edges."""
    size = max(1, len(graph.tasks), len(graph.edges) // _EDGES_PER_TASK)
    return min(DEFAULT_EVALUATIONS, _planner.DEFAULT_PLACED_TASKS // size)


def place_tasks(
    graph: TaskGraph,
    *,
    objective: Objective | str = Objective.LATENCY,
    max_slowdown: float | None = None,
    max_evaluations: int | None = None,
    seed: int = 0,
) -> TaskPlacement:
    """Give every task a processor that can run it and has the memory for it.

    Tries a portfolio of heuristics, including all tasks on one processor, and improves on them by a
    search. Its limit is counted, never timed: the same input gives the same placement. The result
    is never worse than the best of the portfolio.

    Args:
        graph: the tasks and processors.
        objective: the quantity to minimise.
        max_slowdown: for energy only, the allowed multiple of the least latency found, 1 or more.
        max_evaluations: placements that the search may evaluate; 0 turns it off; None:
            `default_evaluations`.
        seed: of the search's random numbers.

    Raises:
        PlanError: the edges form a cycle or name a task that does not exist; a cost, size, limit,
            bandwidth or number of watts is negative, or too large (all together takes 2^62 ns or
            bytes or more); a link is missing; no processor can run a task; the memory does not
            suffice (the message says whether that is proved); or an option is out of range.
    """
    chosen = _objective(objective)
    if (chosen is Objective.ENERGY) != (max_slowdown is not None):
        raise PlanError(
            "expected max_slowdown (by how much the latency may exceed the least one) for the "
            f"least energy, and for no other objective; got {max_slowdown} for {chosen}"
        )
    limit = default_evaluations(graph) if max_evaluations is None else max_evaluations
    if not (0 <= seed < 2**64 and 0 <= limit < 2**63):
        raise PlanError(
            f"expected a seed below 2^64 and a limit below 2^63, got {seed} and {limit}"
        )
    placement, method, n_evaluations, bound_ns, bound_nj, limit_ns, candidates = (
        _planner.place_tasks(
            *_columns(graph),
            objective=_NUMBERS[chosen],
            max_slowdown=1.0 if max_slowdown is None else max_slowdown,
            max_evaluations=limit,
            seed=seed,
        )
    )
    processors, begin_ns, end_ns, latency_ns, period_ns, energy_nj = placement
    is_energy = chosen is Objective.ENERGY
    return TaskPlacement(
        graph=graph,
        objective=chosen,
        processors=tuple(processors),
        begin_ns=tuple(begin_ns),
        end_ns=tuple(end_ns),
        latency_ns=latency_ns,
        period_ns=period_ns,
        energy_nj=energy_nj,
        lower_bound=bound_nj if is_energy else bound_ns,
        method=method,
        n_evaluations=n_evaluations,
        latency_limit_ns=limit_ns if is_energy else None,
        candidates=tuple(candidates),
    )


_NUMBERS = {one: number for number, one in enumerate(Objective)}


def _objective(objective: Objective | str) -> Objective:
    try:
        return Objective(objective)
    except ValueError:
        raise PlanError(
            f"expected one of {', '.join(Objective)} as objective, got {objective!r}"
        ) from None


def _columns(graph: TaskGraph) -> tuple[Any, ...]:
    """The graph in the planner's format."""
    n_processors = len(graph.processors)
    costs: list[int] = []
    for index, task in enumerate(graph.tasks):
        if len(task.costs_ns) != n_processors:
            raise PlanError(
                f"task {index} ({task.name}): expected a cost for each of {n_processors} "
                f"processors, got {len(task.costs_ns)}"
            )
        for cost_ns in task.costs_ns:
            if cost_ns is not None and cost_ns < 0:
                raise PlanError(f"task {index} ({task.name}) has a negative cost: {cost_ns} ns")
            costs.append(_CANNOT_RUN if cost_ns is None else cost_ns)
    limits = [
        _NO_LIMIT if one.memory_bytes is None else one.memory_bytes for one in graph.processors
    ]
    for processor in graph.processors:
        if processor.memory_bytes is not None and processor.memory_bytes < 0:
            raise PlanError(
                f"{processor.name} has a negative limit: {processor.memory_bytes} bytes"
            )
    edges = [
        number for one in graph.edges for number in (one.producer, one.consumer, one.size_bytes)
    ]
    return (
        _integers(costs, "costs"),
        _integers((task.memory_bytes for task in graph.tasks), "memory"),
        _integers(edges, "edges"),
        _links(graph),
        _integers((min(limit, 2**62) for limit in limits), "limits"),
        [float(one.busy_watts) for one in graph.processors],
        [float(one.idle_watts) for one in graph.processors],
    )


def _links(graph: TaskGraph) -> list[tuple[float, float]]:
    n_processors = len(graph.processors)
    for pair in graph.links:
        if not all(0 <= one < n_processors for one in pair):
            raise PlanError(f"a link between processors {pair}, and there are {n_processors}")
    if not graph.edges:
        return []
    found = []
    for origin in range(n_processors):
        for target in range(n_processors):
            link = graph.links.get((origin, target))
            if link is None and origin != target:
                raise PlanError(
                    f"expected a link from {graph.processors[origin].name} to "
                    f"{graph.processors[target].name}, since tasks read what others have made"
                )
            is_read = link is not None and origin != target
            found.append((link.overhead_ns, link.bytes_per_second) if is_read else _NO_LINK)  # type: ignore[union-attr]
    return found


def _integers(numbers: Iterable[int], what: str) -> array[int]:
    try:
        return array("q", numbers)
    except OverflowError:
        raise PlanError(f"{what}: expected numbers below 2^63") from None
    except TypeError:
        raise PlanError(f"{what}: expected whole numbers") from None
