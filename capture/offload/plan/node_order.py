"""Edges of a graph whose launches run on several lanes: the necessary part of captured order.

A capture records one stream, so each node waits for the one before it. A graph needs only part of
that order: conflicts of launches over bytes, and the Steps of lanes. Nodes are never ordered
otherwise than in the capture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set

from offload.errors import PlanError
from offload.plan.graph_lifetimes import topological_order
from offload.plan.launch_conflicts import Conflict, launch_conflicts
from offload.plan.lifetimes import lane_graph
from offload.plan.plan import NodeGraph
from offload.plan.steps import Lane, Run
from offload.program import Program, Role


def node_conflicts(
    program: Program, graph: NodeGraph, apart: Set[int] = frozenset()
) -> tuple[Conflict, ...]:
    """Pairs of launches that must keep their order, by the Program and by the nodes of its graph.

    Besides the pairs of `launch_conflicts`: launches of which one is known to touch a Value only
    from its nodes; launches that share an operator's scratch memory, or inputs that share memory;
    and launches on both sides of a node that no launch made, which waits for all before it.

    Args:
        program: including scratch Values.
        graph: as captured; it says which launch made each node.
        apart: scratch Values that are not shared in the end, since each lane gets its own.
    """
    found = set(launch_conflicts(program))
    known: dict[int, set[int]] = {}
    for launch in program.launches:
        for touched in (*launch.reads, *launch.writes):
            known.setdefault(touched, set()).add(launch.index)
    for value in program.values:
        if value.index in apart:
            continue
        users = sorted({graph.launches[node] for node in graph.touches[value.index]} - {-1})
        if value.role is Role.SCRATCH:
            found.update(itertools.pairwise(users))
            continue
        for one in users:
            if one not in known.get(value.index, ()):  # unknown whether it reads or writes
                found.update((min(one, other), max(one, other)) for other in users if one != other)
    found.update(_of_shared_inputs(program))
    found.update(_around_strays(graph))
    return tuple(sorted(found))


def _of_shared_inputs(program: Program) -> Iterator[Conflict]:
    """Yield pairs: one writes an input, the other uses another input on the same memory."""
    for overlap in program.overlaps:
        first, second = (program.inputs[leaf].value for leaf in (overlap.first, overlap.second))
        for one, other in itertools.product(program.launches, repeat=2):
            touched = first in (*one.reads, *one.writes), second in (*other.reads, *other.writes)
            is_written = first in one.writes or second in other.writes
            if all(touched) and is_written and one.index != other.index:
                yield min(one.index, other.index), max(one.index, other.index)


def _around_strays(graph: NodeGraph) -> Iterator[Conflict]:
    order, earlier = earlier_nodes(graph)
    for stray in (node for node in order if graph.launches[node] < 0):
        before = {graph.launches[node] for node in order if earlier[stray] >> node & 1} - {-1}
        after = {graph.launches[node] for node in order if earlier[node] >> stray & 1} - {-1}
        for one, other in itertools.product(before, after):
            if one < other:
                yield one, other


def lane_edges(
    program: Program, graph: NodeGraph, lanes: Sequence[Lane]
) -> tuple[tuple[int, int], ...]:
    """The fewest edges by which nodes keep their order in lanes of launches.

    Nodes of one launch keep their captured order, nodes of two launches that of the steps of lanes,
    if any, and nodes that no launch made keep their order with all others. Implied edges are left
    out. Every edge is full: what an edge that lets kernels overlap allows need not hold for a node
    that follows several others.

    Args:
        program: the Program whose launches the lanes run.
        graph: as captured.
        lanes: of its launches, from conflicts that `node_conflicts` gave.

    Raises:
        PlanError: as `lane_graph`; or the edges form a cycle.
    """
    before = _launches_before(len(program.launches), lane_graph(program, lanes).edges)
    order = topological_order(graph)
    place = {node: at for at, node in enumerate(order)}
    # With nodes numbered by position, the latest predecessor is the highest bit.
    in_order = NodeGraph(
        graph.n_nodes, tuple((place[one], place[other]) for one, other in graph.edges), ()
    )
    _, earlier = earlier_nodes(in_order)
    launches = [graph.launches[node] for node in order]
    nodes_of: dict[int, int] = {}
    for at, launch in enumerate(launches):
        nodes_of[launch] = nodes_of.get(launch, 0) | 1 << at
    ordered_with = {
        launch: _union(nodes_of.get(one, 0) for one in (launch, -1, *before[launch]))
        for launch in nodes_of
        if launch >= 0
    }
    found: list[tuple[int, int]] = []
    kept = [0] * graph.n_nodes  # for each node, those before it by the edges found
    for at, launch in enumerate(launches):
        missing = earlier[at] & (ordered_with[launch] if launch >= 0 else -1)
        while missing:
            latest = missing.bit_length() - 1
            found.append((order[latest], order[at]))
            kept[at] |= kept[latest] | 1 << latest
            missing &= ~kept[at]
    return tuple(sorted(found))


def earlier_nodes(graph: NodeGraph) -> tuple[list[int], list[int]]:
    """An order that all edges allow, and for each node its predecessors by any edges, as bits.

    Raises:
        PlanError: the edges form a cycle, or name a node that does not exist.
    """
    order = topological_order(graph)
    after: list[list[int]] = [[] for _ in range(graph.n_nodes)]
    for one, other in graph.edges:
        after[one].append(other)
    earlier = [0] * graph.n_nodes
    for node in order:
        for other in after[node]:
            earlier[other] |= earlier[node] | 1 << node
    return order, earlier


def _launches_before(n_launches: int, edges: Sequence[tuple[int, int]]) -> list[set[int]]:
    """For each launch, all launches that end before it, including those without nodes."""
    graph = NodeGraph(n_launches, tuple(edges), ())
    _, earlier = earlier_nodes(graph)
    return [set(_bits(one)) for one in earlier]


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _union(sets: Iterator[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def lane_of_launches(n_launches: int, lanes: Sequence[Lane]) -> tuple[int, ...]:
    """The lane of each launch.

    Raises:
        PlanError: a launch is on no lane.
    """
    found = [-1] * n_launches
    for index, lane in enumerate(lanes):
        for step in lane.steps:
            if isinstance(step, Run):
                found[step.first : step.last] = [index] * (step.last - step.first)
    if -1 in found:
        raise PlanError(f"no lane runs launch {found.index(-1)}")
    return tuple(found)
