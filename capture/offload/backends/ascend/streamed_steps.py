"""Copies of streamed weights in a model: two streams, ordered by events, and the proof.

A model's launches stand on one stream, one behind the other, and copies on a second one, which
begins with a wait for the first and whose last event the first waits for, as every capture of two
streams needs. Between them stand only those events that no other one implies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from offload.backends.captured.streamed_copies import StreamedCopy, StreamedGraph, check_order
from offload.errors import CaptureError
from offload.native import _native
from offload.plan import NodeGraph
from offload.plan.streaming import Streaming
from offload.program import Program

Kind = _native.AscendStepKind
Stream = _native.AscendStepStream


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One thing that a stream of the model is told.

    Attributes:
        kind: a node is launched, a transfer copied, an event recorded or waited for; or the outputs
            are ready.
        stream: which.
        index: of the node, the transfer or the event.
    """

    kind: Kind
    stream: Stream
    index: int


def launch_graph(program: Program, touches: Sequence[Sequence[int]]) -> NodeGraph:
    """Launches one behind the other, as a graph.

    Args:
        program: has the Values.
        touches: for each node, in order, the Values that it may read or write.
    """
    touched_by: list[list[int]] = [[] for _ in program.values]
    for node, values in enumerate(touches):
        for value in dict.fromkeys(values):
            touched_by[value].append(node)
    n_nodes = len(touches)
    edges = tuple((node - 1, node) for node in range(1, n_nodes))
    return NodeGraph(n_nodes, edges, tuple(tuple(nodes) for nodes in touched_by))


def streamed_steps(
    program: Program, graph: NodeGraph, streaming: Streaming, streamed: StreamedGraph
) -> tuple[Step, ...]:
    """What the streams of a model are told, in order, and the proof that it is enough.

    Args:
        program: what the model carries out.
        graph: as `launch_graph` gives it.
        streaming: the plan.
        streamed: after and before which nodes the copies stand.

    Returns:
        Nodes in order; each transfer once; each event recorded once, and waited for once behind it.

    Raises:
        CaptureError: the order of the steps does not protect a weight.
    """
    steps = _Writer(graph.n_nodes, streamed.copies).write()
    check_steps(program, graph, streaming, streamed, steps)
    return steps


class _Writer:
    """Writes the steps of one model."""

    def __init__(self, n_nodes: int, copies: Sequence[StreamedCopy]) -> None:
        self._n_nodes = n_nodes
        self._copies = copies
        self._waits = _needed_waits(n_nodes, copies)
        self._awaited = {copy for copies in self._waits.values() for copy in copies}
        self._steps: list[Step] = []
        self._n_events = 0
        self._n_copied = 0
        self._ended: dict[int, int] = {}  # by node, the event behind it
        self._arrived: dict[int, int] = {}  # by copy, likewise

    def write(self) -> tuple[Step, ...]:
        followed = {node for copy in self._copies for node in copy.after}
        if self._copies and not self._copies[0].after:  # what else would fork the second stream
            self._add(Kind.WAIT, Stream.COPIES, self._record(Stream.LAUNCHES))
        self._copy(ended=-1)
        for node in range(self._n_nodes):
            for copy in self._waits.get(node, ()):
                self._add(Kind.WAIT, Stream.LAUNCHES, self._arrived[copy])
            self._add(Kind.NODE, Stream.LAUNCHES, node)
            if node in followed:
                self._ended[node] = self._record(Stream.LAUNCHES)
            self._copy(ended=node)
        if self._copies:
            self._add(Kind.READY, Stream.LAUNCHES, 0)
            self._add(Kind.WAIT, Stream.LAUNCHES, self._record(Stream.COPIES))
        return tuple(self._steps)

    def _copy(self, ended: int) -> None:
        """Tell the second stream what may be copied once this node has ended."""
        while self._n_copied < len(self._copies):
            copy = self._copies[self._n_copied]
            if any(node > ended for node in copy.after):
                return
            for node in copy.after:
                if node in self._ended:
                    self._add(Kind.WAIT, Stream.COPIES, self._ended.pop(node))
            self._add(Kind.COPY, Stream.COPIES, copy.transfer)
            if self._n_copied in self._awaited:
                self._arrived[self._n_copied] = self._record(Stream.COPIES)
            self._n_copied += 1

    def _record(self, stream: Stream) -> int:
        event = self._n_events
        self._n_events += 1
        self._add(Kind.RECORD, stream, event)
        return event

    def _add(self, kind: Kind, stream: Stream, index: int) -> None:
        self._steps.append(Step(kind, stream, index))


def _needed_waits(n_nodes: int, copies: Sequence[StreamedCopy]) -> dict[int, list[int]]:
    """By node the copies that it waits for: those that no other wait implies."""
    waits: dict[int, list[int]] = {}
    earliest = n_nodes  # the first node that waits for a later copy
    for index in reversed(range(len(copies))):
        for node in copies[index].before:
            if node < earliest:
                waits.setdefault(node, []).append(index)
                earliest = node
    return waits


def check_steps(
    program: Program,
    graph: NodeGraph,
    streaming: Streaming,
    streamed: StreamedGraph,
    steps: Sequence[Step],
) -> None:
    """Prove by streams and events alone that no launch reads, and no copy overwrites, too early.

    Raises:
        CaptureError: as `streamed_copies.check_order`; or an event is recorded twice or waited for
            too early, nothing says that the outputs are ready, or a capture of the steps would not
            be forked or joined.
    """
    edges, ready_after = step_order(graph.n_nodes, streamed, steps)
    found = dataclasses.replace(streamed, ready_after=ready_after)
    check_order(program, graph, streaming, found, edges)


def step_order(
    n_nodes: int, streamed: StreamedGraph, steps: Sequence[Step]
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """The order that streams and events enforce.

    Returns:
        As edges of nodes, the copies numbered behind the launches in the order of
        `streamed.copies`; and after which of them the outputs are ready.

    Raises:
        CaptureError: as `check_steps`.
    """
    numbers = {copy.transfer: n_nodes + at for at, copy in enumerate(streamed.copies)}
    number_of: dict[Kind, Callable[[int], int]] = {
        Kind.NODE: lambda node: node,
        Kind.COPY: lambda transfer: numbers[transfer],
    }
    begun = {Stream.LAUNCHES}
    edges: list[tuple[int, int]] = []
    tails: dict[Stream, frozenset[int]] = dict.fromkeys(
        (Stream.LAUNCHES, Stream.COPIES), frozenset()
    )
    events: dict[int, frozenset[int]] = {}
    ready: frozenset[int] | None = None if streamed.copies else frozenset(range(n_nodes))
    for step in steps:
        tail = tails[step.stream]
        if step.kind is Kind.WAIT:
            begun.add(step.stream)
        elif step.stream not in begun:
            raise CaptureError("the stream of the copies waits for nothing before it begins")
        if step.kind in number_of:
            node = number_of[step.kind](step.index)
            edges += [(before, node) for before in sorted(tail)]
            tails[step.stream] = frozenset((node,))
        elif step.kind is Kind.READY:
            ready = tail
        elif step.kind is Kind.RECORD:
            if step.index in events:
                raise CaptureError(f"event {step.index} of the model is recorded twice")
            events[step.index] = tail
        elif step.index not in events:
            raise CaptureError(f"event {step.index} of the model is waited for and not recorded")
        else:
            tails[step.stream] = tail | events[step.index]
    if not tails[Stream.COPIES] <= tails[Stream.LAUNCHES]:
        raise CaptureError("the stream of the copies would not be joined to that of the launches")
    if ready is None:
        raise CaptureError("nothing says when the model's outputs are ready")
    return edges, tuple(sorted(ready))
