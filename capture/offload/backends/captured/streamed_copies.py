"""A Plan's copies in the executed graph: the nodes before and behind each, and the proof.

The nodes are a graph: captured ones, or launches in sequence. The copies of a pass form one chain
among them, in the order of their lane: those for this execution, then those for the next. The link
is thus busy while the last launches run, and into the next execution. If the plan's steps let a
copy wait for a launch, it waits for those nodes of it and of earlier launches that use the bytes
that it writes; its content is read by the nodes from the launch that waits for it up to the one
that waits for the next copy of that piece.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence, Set

from offload.errors import CaptureError
from offload.plan import NodeGraph
from offload.plan.steps import Transfer, n_copied_ahead
from offload.plan.streaming import Piece, Streaming
from offload.program import Program

ADVICE = "load with a budget for all weights"


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedCopy:
    """One transfer in the graph.

    Attributes:
        transfer: its index in `Streaming.transfers`.
        after: the nodes that read what it overwrites, in this execution.
        before: the nodes that read what it writes; empty if it is for the next execution.
        for_next_pass: it writes content for the beginning of the next execution.
    """

    transfer: int
    after: tuple[int, ...]
    before: tuple[int, ...]
    for_next_pass: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedGraph:
    """The additions to a captured graph.

    Attributes:
        copies: in execution order, each after the one before.
        ready_after: the nodes after which the outputs are ready: those without successors.
    """

    copies: tuple[StreamedCopy, ...]
    ready_after: tuple[int, ...]


def streamed_graph(program: Program, graph: NodeGraph, streaming: Streaming) -> StreamedGraph:
    """The places of a pass's transfers in a graph.

    Args:
        program: that the graph executes.
        graph: its nodes and edges, what each node touches, and which launch made it.
        streaming: the plan.

    Raises:
        CaptureError: a node uses a streamed weight that its launch does not read, and of which the
            plan is therefore unaware.
    """
    transfers = streaming.transfers
    pieces = [streaming.pieces[one.piece] for one in transfers]
    for piece in pieces:
        _check_readers(program, graph, piece)
    n_early = n_copied_ahead(streaming.lanes)
    earlier = _earlier(graph.n_nodes, graph.edges, graph.overlapping)
    copies = []
    waited = 0  # nodes that some copy already waits for
    for index in _in_order(len(pieces), n_early):
        for_next_pass, one = index < n_early, transfers[index]
        after = {
            node
            for other in pieces
            if (for_next_pass or one.after_pass == 0) and _overlap(other, pieces[index])
            for node in graph.touches[other.value]
            if graph.launches[node] <= one.after_launch
        }
        last = _last({node for node in after if not waited >> node & 1}, earlier)
        for node in last:
            waited |= earlier[node] | 1 << node
        end = _next_copy(transfers, index, len(program.launches))
        readers = [
            node
            for node in graph.touches[pieces[index].value]
            if one.first_launch <= graph.launches[node] < end
        ]
        before = () if for_next_pass else _first(readers, earlier)
        copies.append(StreamedCopy(index, last, before, for_next_pass))
    followed = {edge[0] for edge in graph.edges if edge not in graph.overlapping}
    ready_after = tuple(node for node in range(graph.n_nodes) if node not in followed)
    found = StreamedGraph(tuple(copies), ready_after)
    check_copies(program, graph, streaming, found)
    return found


def _in_order(n_transfers: int, n_early: int) -> list[int]:
    """Transfers in the order of the copy lane: those for the next execution at the end."""
    return [*range(n_early, n_transfers), *range(n_early)]


def _next_copy(transfers: Sequence[Transfer], index: int, n_launches: int) -> int:
    """The launch that waits for the next copy of the same piece; beyond all if there is none."""
    return next(
        (one.first_launch for one in transfers[index + 1 :] if one.piece == transfers[index].piece),
        n_launches,
    )


def _check_readers(program: Program, graph: NodeGraph, piece: Piece) -> None:
    readers = {one.index for one in program.launches if piece.value in one.reads}
    for node in graph.touches[piece.value]:
        launch = graph.launches[node]
        if launch not in readers:
            where = f"launch {launch}" if launch >= 0 else "no launch"
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
    """Prove by a graph's edges that no launch reads too early and no copy overwrites too early.

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
    """Prove from the enforced order alone that nothing reads or overwrites too early.

    The order is given as edges (overlapping edges enforce none), independently of actual
    concurrency and of how the copies were placed. Two executions follow each other, so the second
    begins with what the first left in the ring.

    Args:
        program: that the graph executes.
        graph: what each node touches, and which nodes overlap; its own edges are ignored.
        streaming: the plan.
        streamed: the copies, and the nodes after which the outputs are ready.
        edges: between nodes; copies are numbered behind the graph's nodes, in the order of
            `streamed.copies`.

    Raises:
        CaptureError: the edges make a cycle, a copy is missing, or an order is not enforced; the
            message names weights and nodes.
    """
    n_early = sum(copy.for_next_pass for copy in streamed.copies)
    n_copies = len(streaming.transfers)
    if sorted(one.transfer for one in streamed.copies) != list(range(n_copies)):
        raise CaptureError(f"the graph does not make each copy of a weight once; {ADVICE}")
    # A weight without a reading node has no reader to show that its copy came first.
    if [(one.transfer, one.for_next_pass) for one in streamed.copies] != [
        (one, one < n_early) for one in _in_order(n_copies, n_early)
    ]:
        raise CaptureError(
            "copies are not in the order of transfers, with those for the next execution (its "
            f"first ones) at the end; {ADVICE}"
        )
    earlier = _earlier(graph.n_nodes + n_copies, edges, graph.overlapping)
    for node in range(graph.n_nodes + 1, graph.n_nodes + n_copies):
        if not earlier[node] >> (node - 1) & 1:
            raise CaptureError(
                f"copy {node - graph.n_nodes} does not wait for the one before it; {ADVICE}"
            )
    order = _Order(program, graph, streaming, streamed.copies, earlier)
    order.check_early()
    for index in {copy.piece for copy in streaming.transfers}:
        for node in graph.touches[streaming.pieces[index].value]:
            order.check_reader(node, index)
    ready = 0
    for node in streamed.ready_after:
        ready |= earlier[node] | 1 << node
    if any(not ready >> node & 1 for node in range(graph.n_nodes)):
        raise CaptureError(f"the outputs would be ready before every node has ended; {ADVICE}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    """The order that the edges of a graph with copies enforce.

    Attributes:
        copies: one chain, numbered behind the graph's nodes.
        earlier: for each node those that end before it, as bits.
    """

    program: Program
    graph: NodeGraph
    streaming: Streaming
    copies: Sequence[StreamedCopy]
    earlier: Sequence[int]

    def check_early(self) -> None:
        """Check that all content for the next execution is in place when that begins."""
        early = [self._piece(at) for at, one in enumerate(self.copies) if one.for_next_pass]
        for one, other in itertools.combinations(early, 2):
            if _overlap(one, other):
                raise CaptureError(
                    f"{self._name(other)} and {self._name(one)} would be copied to one place "
                    f"before the execution that reads both begins; {ADVICE}"
                )

    def check_reader(self, node: int, index: int) -> None:
        """Check that a node that reads a piece finds it, and that nothing overwrites it.

        Its content comes from the last copy that the plan makes for its launch or an earlier one of
        this execution; if there is none, from the execution before.
        """
        n_nodes, piece = self.graph.n_nodes, self.streaming.pieces[index]
        own = self._copy_for(self.graph.launches[node], index)
        if own >= 0 and not self.earlier[node] >> (n_nodes + own) & 1:
            raise CaptureError(
                f"node {node} reads {self._name(piece)} and does not wait for its copy; {ADVICE}"
            )
        for at in range(own + 1, len(self.copies)):
            other = self._piece(at)
            if _overlap(other, piece) and not self.earlier[n_nodes + at] >> node & 1:
                raise CaptureError(
                    f"the copy of {self._name(other)} does not wait for node {node}, which "
                    f"reads {self._name(piece)} at the same place; {ADVICE}"
                )

    def _copy_for(self, launch: int, index: int) -> int:
        """The copy of a piece for a launch in this execution; -1: the previous one made it."""
        found, is_early = -1, False
        for at, copy in enumerate(self.copies):
            transfer = self.streaming.transfers[copy.transfer]
            if transfer.piece == index:
                is_early |= copy.for_next_pass
                if not copy.for_next_pass and transfer.first_launch <= launch:
                    found = at
        if found < 0 and not is_early:
            name = self._name(self.streaming.pieces[index])
            raise CaptureError(f"no copy writes {name} before launch {launch} reads it; {ADVICE}")
        return found

    def _piece(self, at: int) -> Piece:
        return self.streaming.pieces[self.streaming.transfers[self.copies[at].transfer].piece]

    def _name(self, piece: Piece) -> str:
        return self.program.values[piece.value].name


def _earlier(
    n_nodes: int, edges: Sequence[tuple[int, int]], overlapping: Set[tuple[int, int]]
) -> list[int]:
    """For each node, as bits, all nodes that end before it begins.

    An overlapping edge orders no copy: it lets a kernel read weights before it waits for the kernel
    before.

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
