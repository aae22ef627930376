"""When each Value must exist on a device that runs a graph, whose branches may run at once."""

from __future__ import annotations

from offload.errors import PlanError
from offload.plan.plan import Lifetime, NodeGraph
from offload.program import PLACED_ROLES, Program


def graph_lifetimes(program: Program, graph: NodeGraph) -> tuple[Lifetime, ...]:
    """For each Value the segments of the graph in which it must exist.

    An activation or scratch Value lives from the first to the last segment of the nodes that touch
    it; inputs, weights and outputs live for the whole execution. Values with disjoint lifetimes are
    touched by nodes of which each one of the first ends before any of the second begins, so they
    may share bytes. A Value that no node touches has an empty lifetime.

    Raises:
        PlanError: the edges form a cycle, or name a node that there is not.
    """
    segments = node_segments(graph)
    n_segments = max(segments, default=-1) + 1
    touched: dict[int, Lifetime] = {}  # by the identity of the nodes, which many Values may share
    lifetimes = []
    for value, nodes in zip(program.values, graph.touches, strict=True):
        if value.role not in PLACED_ROLES:
            lifetimes.append(Lifetime(0, n_segments))
        elif nodes:
            if id(nodes) not in touched:
                its_segments = [segments[node] for node in nodes]
                touched[id(nodes)] = Lifetime(min(its_segments), max(its_segments) + 1)
            lifetimes.append(touched[id(nodes)])
        else:
            lifetimes.append(Lifetime(0, 0))
    return tuple(lifetimes)


def node_segments(graph: NodeGraph) -> list[int]:
    """For each node the number of its segment.

    A cut node is one that every other node precedes or follows; it is a segment of its own. What
    lies between two cut nodes in a row is one segment, since its nodes may run at once. Every node
    of a segment ends before any of a later one begins. In a chain each node is a segment.

    Raises:
        PlanError: as `graph_lifetimes`.
    """
    order = _topological_order(graph)
    position = [0] * graph.n_nodes
    for place, node in enumerate(order):
        position[node] = place
    # Everything before a node leads to it if nothing before it is without a successor up to there;
    # everything after it follows from it if nothing after it is without a predecessor from there.
    n_nodes = graph.n_nodes
    first_successor = [n_nodes] * n_nodes
    last_predecessor = [-1] * n_nodes
    for before, after in graph.edges:
        early, late = position[before], position[after]
        first_successor[early] = min(first_successor[early], late)
        last_predecessor[late] = max(last_predecessor[late], early)
    follows_all = [True] * n_nodes
    furthest = -1
    for place in range(n_nodes):
        follows_all[place] = furthest <= place
        furthest = max(furthest, first_successor[place])
    precedes_all = [True] * n_nodes
    nearest = n_nodes
    for place in reversed(range(n_nodes)):
        precedes_all[place] = nearest >= place
        nearest = min(nearest, last_predecessor[place])
    segments = [0] * n_nodes
    segment, is_open = 0, False
    for place, node in enumerate(order):
        is_cut = follows_all[place] and precedes_all[place]
        if is_cut and is_open:
            segment += 1
        segments[node] = segment
        segment += is_cut
        is_open = not is_cut
    return segments


def _topological_order(graph: NodeGraph) -> list[int]:
    followers: list[list[int]] = [[] for _ in range(graph.n_nodes)]
    n_before = [0] * graph.n_nodes
    for before, after in graph.edges:
        if not (0 <= before < graph.n_nodes and 0 <= after < graph.n_nodes):
            raise PlanError(f"edge {before} to {after} in a graph of {graph.n_nodes} nodes")
        followers[before].append(after)
        n_before[after] += 1
    order = [node for node in range(graph.n_nodes) if not n_before[node]]
    for node in order:  # it grows while it is read
        for after in followers[node]:
            n_before[after] -= 1
            if not n_before[after]:
                order.append(after)
    if len(order) != graph.n_nodes:
        raise PlanError("the edges of the device's graph form a cycle")
    return order
