"""The live ranges of Values."""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors import PlanError
from offload.plan.graph_lifetimes import graph_lifetimes
from offload.plan.plan import Lifetime, NodeGraph
from offload.plan.steps import Lane, Record, Run, Wait
from offload.program import PLACED_ROLES, Program


def value_lifetimes(program: Program, lanes: Sequence[Lane] = ()) -> tuple[Lifetime, ...]:
    """For each Value, the launches between which it must exist.

    An activation lives from its first launch to after its last; inputs, weights and outputs live
    for the whole execution. A Value that no launch touches has an empty lifetime. Where lanes wait
    for one another at the beginning of an execution, no Value of another execution exists
    meanwhile.

    Args:
        program: the Program of the Values.
        lanes: the lanes that run launches concurrently; empty: launches run in recorded order.

    Raises:
        PlanError: lanes wait for one another, or launches are left out or run twice.
    """
    if lanes:
        return graph_lifetimes(program, lane_graph(program, lanes))
    n_launches = len(program.launches)
    first = [n_launches] * len(program.values)
    last = [0] * len(program.values)
    for launch in program.launches:
        for index in (*launch.reads, *launch.writes):
            first[index] = min(first[index], launch.index)
            last[index] = max(last[index], launch.index + 1)
    return tuple(
        Lifetime(min(first[value.index], last[value.index]), last[value.index])
        if value.role in PLACED_ROLES
        else Lifetime(0, n_launches)
        for value in program.values
    )


def lane_graph(program: Program, lanes: Sequence[Lane]) -> NodeGraph:
    """The launches of an execution as a graph whose edges are the order of the lanes' steps.

    Raises:
        PlanError: as `value_lifetimes`.
    """
    edges: set[tuple[int, int]] = set()
    events: dict[int, frozenset[int]] = {}
    tails: list[frozenset[int]] = [frozenset() for _ in lanes]
    at = [0] * len(lanes)
    launches: list[int] = []
    while any(position < len(lane.steps) for position, lane in zip(at, lanes, strict=True)):
        before = list(at)
        for index, lane in enumerate(lanes):
            for step in lane.steps[at[index] :]:
                if isinstance(step, Wait) and step.age == 0:
                    if step.event not in events:
                        break
                    tails[index] |= events[step.event]
                elif isinstance(step, Record):
                    events[step.event] = tails[index]
                elif isinstance(step, Run):
                    for launch in range(step.first, step.last):
                        edges.update((one, launch) for one in tails[index])
                        tails[index] = frozenset((launch,))
                        launches.append(launch)
                at[index] += 1
        if before == at:
            raise PlanError("lanes wait for one another, or for an event that is never recorded")
    n_launches = len(program.launches)
    if sorted(launches) != list(range(n_launches)):
        raise PlanError(f"expected each of {n_launches} launches once in the steps of an execution")
    touches: list[list[int]] = [[] for _ in program.values]
    for one in program.launches:
        for value in dict.fromkeys((*one.reads, *one.writes)):
            touches[value].append(one.index)
    return NodeGraph(n_launches, tuple(sorted(edges)), tuple(map(tuple, touches)))
