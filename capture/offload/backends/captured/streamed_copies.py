"""Copies of streamed weights in what a device executes: after which nodes, before which, and proof.

The nodes are a graph: those that were captured, or launches one behind the other. The transfers of
a pass stand among them as one chain of copies: those that wait for a launch of the same pass, in
order, and behind them those whose bytes are free when the pass before ends, for the next pass. The
link so goes on while the last launches run, and into the next execution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from offload.errors import CaptureError
from offload.plan import NodeGraph
from offload.plan.steps import n_copied_ahead
from offload.plan.streaming import Piece, Streaming
from offload.program import Program

ADVICE = "load with a budget for all weights"


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedCopy:
    """One transfer in the graph.

    Attributes:
        transfer: its index in `Streaming.transfers`.
        after: the nodes that read what it overwrites, in this execution.
        before: the nodes that read what it brings; none where it is for the next execution.
        for_next_pass: it brings what the next execution begins with.
    """

    transfer: int
    after: tuple[int, ...]
    before: tuple[int, ...]
    for_next_pass: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedGraph:
    """What is added to a captured graph.

    Attributes:
        copies: in the order in which they run, each after the one before.
        ready_after: the nodes after which the outputs are ready: those that no other one follows.
    """

    copies: tuple[StreamedCopy, ...]
    ready_after: tuple[int, ...]


def streamed_graph(
    program: Program, graph: NodeGraph, launches: Sequence[int], streaming: Streaming
) -> StreamedGraph:
    """Where the transfers of a pass stand in a graph.

    Args:
        program: what the graph carries out.
        graph: its nodes and edges, and who touches what.
        launches: for each of its nodes the launch that made it; -1 where none did.
        streaming: the plan.

    Raises:
        CaptureError: a node uses a streamed weight that its launch does not read, so that the plan
            does not know of it.
    """
    pieces = [streaming.pieces[one.piece] for one in streaming.transfers]
    for piece in pieces:
        _check_readers(program, graph, launches, piece)
    n_early = n_copied_ahead(streaming.lanes)
    earlier = _earlier(graph.n_nodes, graph.edges, graph.overlapping)
    copies = []
    waited = 0  # for these nodes some copy waits already
    for index in (*range(n_early, len(pieces)), *range(n_early)):
        for_next_pass = index < n_early
        # What was there in this pass: of what is brought now, all that came before it.
        others = pieces if for_next_pass else pieces[:index]
        after = {
            node
            for other in others
            if _overlap(other, pieces[index])
            for node in graph.touches[other.value]
        }
        last = _last({node for node in after if not waited >> node & 1}, earlier)
        for node in last:
            waited |= earlier[node] | 1 << node
        before = () if for_next_pass else _first(graph.touches[pieces[index].value], earlier)
        copies.append(StreamedCopy(index, last, before, for_next_pass))
    followed = {edge[0] for edge in graph.edges if edge not in graph.overlapping}
    ready_after = tuple(node for node in range(graph.n_nodes) if node not in followed)
    found = StreamedGraph(tuple(copies), ready_after)
    check_copies(program, graph, streaming, found)
    return found


def _check_readers(
    program: Program, graph: NodeGraph, launches: Sequence[int], piece: Piece
) -> None:
    readers = {one.index for one in program.launches if piece.value in one.reads}
    for node in graph.touches[piece.value]:
        if launches[node] not in readers:
            where = f"launch {launches[node]}" if launches[node] >= 0 else "no launch"
            raise CaptureError(
                f"node {node} of {where} holds the address of {program.values[piece.value].name}, "
                f"which the launch was not seen to read: it cannot be streamed; {ADVICE}"
            )


def _last(nodes: Set[int], earlier: Sequence[int]) -> tuple[int, ...]:
    """Those of some nodes that none of the others follows."""
    followed = 0
    for node in nodes:
        followed |= earlier[node]
    return tuple(node for node in sorted(nodes) if not followed >> node & 1)


def _first(nodes: Sequence[int], earlier: Sequence[int]) -> tuple[int, ...]:
    """Those of some nodes that follow none of the others."""
    bits = 0
    for node in nodes:
        bits |= 1 << node
    return tuple(node for node in nodes if not earlier[node] & bits)


def _overlap(one: Piece, other: Piece) -> bool:
    begin = max(one.memory_offset_bytes, other.memory_offset_bytes)
    one_end = one.memory_offset_bytes + one.size_bytes
    other_end = other.memory_offset_bytes + other.size_bytes
    return begin < min(one_end, other_end)


def check_copies(
    program: Program, graph: NodeGraph, streaming: Streaming, streamed: StreamedGraph
) -> None:
    """Prove that no launch reads too early and no copy overwrites too early, by a graph's edges.

    Raises:
        CaptureError: as `check_order`.
    """
    edges = list(graph.edges)
    for node, copy in enumerate(streamed.copies, start=graph.n_nodes):
        edges += [(before, node) for before in copy.after]
        edges += [(node, behind) for behind in copy.before]
    n_copies = len(streamed.copies)
    edges += [(node - 1, node) for node in range(graph.n_nodes + 1, graph.n_nodes + n_copies)]
    check_order(program, graph, streaming, streamed, edges)


def check_order(
    program: Program,
    graph: NodeGraph,
    streaming: Streaming,
    streamed: StreamedGraph,
    edges: Sequence[tuple[int, int]],
) -> None:
    """Prove by the order that is enforced alone that nothing reads or overwrites too early.

    Takes it as edges (those that let kernels overlap enforce none), whatever else happens to run
    at once, and knows nothing of how the copies were placed. Two executions follow each other, so
    what the first one leaves in the ring is what the second one begins with.

    Args:
        program: what the graph carries out.
        graph: who touches what, and which of its nodes overlap; its own edges do not count.
        streaming: the plan.
        streamed: the copies, and after which nodes the outputs are ready.
        edges: of nodes, the copies numbered behind the graph's in the order of `streamed.copies`.

    Raises:
        CaptureError: the edges make a cycle, a copy is missing, or an order is not enforced; the
            message names weights and nodes.
    """
    n_early = sum(copy.for_next_pass for copy in streamed.copies)
    if sorted(one.transfer for one in streamed.copies) != list(range(len(streaming.transfers))):
        raise CaptureError(f"the graph does not copy each streamed weight once; {ADVICE}")
    # A weight that no node reads has no reader to show that its copy came first.
    in_order = [*range(n_early, len(streaming.transfers)), *range(n_early)]
    if [(one.transfer, one.for_next_pass) for one in streamed.copies] != [
        (one, one < n_early) for one in in_order
    ]:
        raise CaptureError(
            "copies do not stand in the order of transfers, those for the next execution, which "
            f"are its first ones, at the end; {ADVICE}"
        )
    earlier = _earlier(graph.n_nodes + len(streamed.copies), edges, graph.overlapping)
    pieces = [streaming.pieces[one.piece] for one in streaming.transfers]
    order = _Order(program, graph, pieces, earlier)
    for node, copy in enumerate(streamed.copies, start=graph.n_nodes):
        if node > graph.n_nodes and not earlier[node] >> (node - 1) & 1:
            raise CaptureError(
                f"copy {node - graph.n_nodes} does not wait for the one before it; {ADVICE}"
            )
        if not copy.for_next_pass:
            order.check_readers(node, copy)
        order.check_overwritten(node, copy)
    ready = 0
    for node in streamed.ready_after:
        ready |= earlier[node] | 1 << node
    if any(not ready >> node & 1 for node in range(graph.n_nodes)):
        raise CaptureError(f"the outputs would be ready before every node has ended; {ADVICE}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    """What the edges of a graph with copies enforce.

    Attributes:
        pieces: by transfer what it brings.
        earlier: for each node, copies behind the captured ones, those that end before, as bits.
    """

    program: Program
    graph: NodeGraph
    pieces: Sequence[Piece]
    earlier: Sequence[int]

    def check_readers(self, node: int, copy: StreamedCopy) -> None:
        """Whether every reader waits for what the copy brings."""
        piece = self.pieces[copy.transfer]
        for reader in self.graph.touches[piece.value]:
            if not self.earlier[reader] >> node & 1:
                raise CaptureError(
                    f"node {reader} reads {self._name(piece)} and does not wait for its copy; "
                    f"{ADVICE}"
                )

    def check_overwritten(self, node: int, copy: StreamedCopy) -> None:
        """Whether a copy waits for all that was brought to its place in this execution."""
        piece = self.pieces[copy.transfer]
        for transfer, other in enumerate(self.pieces):
            if not _overlap(other, piece) or not (copy.for_next_pass or transfer < copy.transfer):
                continue
            if copy.for_next_pass and transfer < copy.transfer:
                raise CaptureError(
                    f"{self._name(piece)} and {self._name(other)} would be brought to one place "
                    f"before the execution begins that reads both; {ADVICE}"
                )
            for reader in self.graph.touches[other.value]:
                if not self.earlier[node] >> reader & 1:
                    raise CaptureError(
                        f"the copy of {self._name(piece)} does not wait for node {reader}, which "
                        f"reads {self._name(other)} at the same place; {ADVICE}"
                    )

    def _name(self, piece: Piece) -> str:
        return self.program.values[piece.value].name


def _earlier(
    n_nodes: int, edges: Sequence[tuple[int, int]], overlapping: Set[tuple[int, int]]
) -> list[int]:
    """For each node, as bits, all nodes that end before it begins.

    Kernels read weights ahead of their wait for the one before, that being what overlapping edges
    are for: such an edge orders no copy.

    Raises:
        CaptureError: the edges make a cycle.
    """
    behind: list[list[int]] = [[] for _ in range(n_nodes)]
    n_before = [0] * n_nodes
    for one, other in edges:
        behind[one].append(other)
        n_before[other] += 1
    free = [node for node in range(n_nodes) if not n_before[node]]
    earlier = [0] * n_nodes
    n_done = 0
    while free:
        node = free.pop()
        n_done += 1
        bits = earlier[node] | 1 << node
        for other in behind[node]:
            if (node, other) not in overlapping:
                earlier[other] |= bits
            n_before[other] -= 1
            if not n_before[other]:
                free.append(other)
    if n_done < n_nodes:
        raise CaptureError(f"launches and copies of weights would wait for each other; {ADVICE}")
    return earlier
