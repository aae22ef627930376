"""Live ranges of Values on a device that runs a graph, whose branches may run concurrently."""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Sequence

from offload.errors import PlanError
from offload.plan.plan import Lifetime, NodeGraph
from offload.program import PLACED_ROLES, Program

MOST_CHAINS = 64
"""For a graph with more concurrent branches, lifetimes are counted in its segments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chains:
    """A graph cut into chains; each node of a chain ends before the next begins.

    Attributes:
        chain, position: of each node.
        ended: for each node and chain, how many nodes of the chain have ended, whatever the timing,
            when the node begins.
    """

    n_chains: int
    chain: tuple[int, ...]
    position: tuple[int, ...]
    ended: tuple[tuple[int, ...], ...]

    def lifetime(self, nodes: Sequence[int]) -> Lifetime:
        """The lifetime of a Value that these nodes, at least one, touch."""
        firsts = map(min, zip(*(self.ended[node] for node in nodes), strict=True))
        lasts = [0] * self.n_chains
        for node in nodes:
            lasts[self.chain[node]] = max(lasts[self.chain[node]], self.position[node] + 1)
        (first, last), *beside = zip(firsts, lasts, strict=True)
        return Lifetime(first, last, tuple(beside))


def graph_lifetimes(program: Program, graph: NodeGraph) -> tuple[Lifetime, ...]:
    """For each Value its live range, by the chains of the graph.

    Two lifetimes overlap exactly if the graph does not order all nodes that touch one Value before
    all nodes that touch the other. Inputs, weights and outputs live for the whole execution; a
    Value that no node touches has an empty lifetime. Where there are more chains than
    `MOST_CHAINS`, lifetimes are counted in segments (`node_segments`), which are coarser.

    Raises:
        PlanError: the edges form a cycle, or name a node that does not exist.
    """
    chains = graph_chains(graph)
    if chains is None:
        segments = tuple(node_segments(graph))
        ended = tuple((segment,) for segment in segments)
        chains = Chains(1, (0,) * graph.n_nodes, segments, ended)
    ends = [0] * chains.n_chains
    for chain, position in zip(chains.chain, chains.position, strict=True):
        ends[chain] = max(ends[chain], position + 1)
    last, *beside = ends or [0]
    throughout = Lifetime(0, last, tuple((0, one) for one in beside))
    never = Lifetime(0, 0, ((0, 0),) * len(beside))
    touched: dict[int, Lifetime] = {}  # by identity of the nodes, which Values may share
    lifetimes = []
    for value, nodes in zip(program.values, graph.touches, strict=True):
        if value.role not in PLACED_ROLES:
            lifetimes.append(throughout)
        elif nodes:
            if id(nodes) not in touched:
                touched[id(nodes)] = chains.lifetime(nodes)
            lifetimes.append(touched[id(nodes)])
        else:
            lifetimes.append(never)
    return tuple(lifetimes)


def graph_chains(graph: NodeGraph) -> Chains | None:
    """Cut a graph into chains: each node joins the chain whose end it follows most closely.

    None if that needs more than `MOST_CHAINS`.

    Raises:
        PlanError: as `graph_lifetimes`.
    """
    before: list[list[int]] = [[] for _ in range(graph.n_nodes)]
    order = topological_order(graph)
    for early, late in graph.edges:
        before[late].append(early)
    lengths: list[int] = []
    tails: list[int] = []  # by chain, the position of its last node in the order
    chain, position = [0] * graph.n_nodes, [0] * graph.n_nodes
    ended: list[list[int]] = [[] for _ in range(graph.n_nodes)]
    for place, node in enumerate(order):
        known = [0] * len(lengths)
        for one in before[node]:
            for index, count in enumerate(ended[one]):
                known[index] = max(known[index], count)
            known[chain[one]] = max(known[chain[one]], position[one] + 1)
        open_chains = [index for index, count in enumerate(known) if count == lengths[index]]
        chosen = max(open_chains, key=tails.__getitem__, default=len(lengths))
        if chosen == len(lengths):
            if chosen == MOST_CHAINS:
                return None
            lengths.append(0)
            tails.append(place)
        chain[node], position[node] = chosen, lengths[chosen]
        lengths[chosen] += 1
        tails[chosen] = place
        ended[node] = known
    n_chains = len(lengths)
    padded = (tuple(one) + (0,) * (n_chains - len(one)) for one in ended)
    return Chains(n_chains, tuple(chain), tuple(position), tuple(padded))


def node_segments(graph: NodeGraph) -> list[int]:
    """Return the segment number of each node.

    Every other node precedes or follows a cut node, which is a segment itself. The nodes between
    two consecutive cut nodes form one segment, as they may run concurrently. Every node of a
    segment ends before any of a later segment begins. In a chain each node is a segment.

    Raises:
        PlanError: as `graph_lifetimes`.
    """
    order = topological_order(graph)
    position = [0] * graph.n_nodes
    for place, node in enumerate(order):
        position[node] = place
    # All nodes before a node lead to it if each of them has a successor up to there; all nodes
    # after it follow from it if each of them has a predecessor from there.
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


def topological_order(graph: NodeGraph) -> list[int]:
    """The nodes of a graph, each after all its predecessors.

    Raises:
        PlanError: the edges form a cycle, or name a node that does not exist.
    """
    sorter = graphlib.TopologicalSorter[int](dict.fromkeys(range(graph.n_nodes), ()))
    for before, after in graph.edges:
        if not (0 <= before < graph.n_nodes and 0 <= after < graph.n_nodes):
            raise PlanError(f"edge {before} to {after} in a graph of {graph.n_nodes} nodes")
        sorter.add(after, before)
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        raise PlanError("the edges of the device's graph form a cycle") from error
