"""The Steps of a Plan, lowered to a model's streams, and the proof.

A model's launches are on one stream, in sequence, and copies on a second stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from offload.backends.captured.streamed_copies import ADVICE, StreamedGraph, check_order
from offload.errors import CaptureError
from offload.native import _native
from offload.plan import NodeGraph
from offload.plan.steps import Copy, Lane, Record, Run, Wait, n_copied_ahead
from offload.plan.streaming import Streaming
from offload.program import Program

Kind = _native.AscendStepKind
Stream = _native.AscendStepStream


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One action on a stream of the model.

    Attributes:
        kind: a node is launched, a transfer copied, an event recorded or waited for; or the outputs
            are ready.
        stream: the stream.
        index: of the node, the transfer or the event.
    """

    kind: Kind
    stream: Stream
    index: int


def launch_graph(
    program: Program, touches: Sequence[Sequence[int]], launches: Sequence[int]
) -> NodeGraph:
    """Return launches in sequence, as a graph.

    Args:
        program: the program of the Values.
        touches: for each node, in order, the Values that it may read or write.
        launches: for each node its launch.
    """
    touched_by: list[list[int]] = [[] for _ in program.values]
    for node, values in enumerate(touches):
        for value in dict.fromkeys(values):
            touched_by[value].append(node)
    n_nodes = len(touches)
    edges = tuple((node - 1, node) for node in range(1, n_nodes))
    nodes_of = tuple(tuple(nodes) for nodes in touched_by)
    return NodeGraph(n_nodes, edges, nodes_of, launches=tuple(launches))


def streamed_steps(
    program: Program,
    graph: NodeGraph,
    streaming: Streaming,
    streamed: StreamedGraph,
) -> tuple[Step, ...]:
    """Lower the Plan's Steps to the streams of a model, and prove their order sufficient.

    Args:
        program: the program of the model.
        graph: the result of `launch_graph`.
        streaming: the plan.
        streamed: its copies, for the proof.

    Returns:
        Nodes in order; each transfer once; each event recorded once, and waited for once after
        that.

    Raises:
        CaptureError: the order of the steps does not protect a weight.
    """
    steps = _Lowering(graph.launches, streaming.lanes).steps()
    check_steps(program, graph, streaming, streamed, steps)
    return steps


class _Lowering:
    """Lowers the lanes of a Plan to a capture of two streams, with waits after their records.

    Executions follow one another on one stream of the device, so no step waits for an event of the
    previous execution. A capture requires more: the second stream begins with a wait for the first,
    and the first waits for it at the end, after the outputs are marked as ready.
    """

    def __init__(self, launches: Sequence[int], lanes: Sequence[Lane]) -> None:
        self._launches = launches
        self._lane = lanes[0]
        self._copies = [one for lane in lanes[1:] for one in lane.steps]
        n_copies = sum(len(lane.copies) for lane in lanes)
        n_ahead = n_copied_ahead(lanes)
        # Transfers are numbered in the order of their use: those copied ahead come first.
        self._transfers = iter([*range(n_ahead, n_copies), *range(n_ahead)])
        self._awaited = {
            one.event
            for lane in lanes
            for one in lane.steps
            if isinstance(one, Wait) and not one.age
        }
        self._steps: list[Step] = []
        self._events: dict[int, int] = {}  # from an event of the Plan to that of the model
        self._n_events = 0
        self._n_copied = 0  # steps of the second lane
        self._n_nodes = 0

    def steps(self) -> tuple[Step, ...]:
        if self._copies and not isinstance(self._copies[0], Wait):
            self._add(Kind.WAIT, Stream.COPIES, self._record(Stream.LAUNCHES))
        self._copy()
        for step in self._lane.steps:
            match step:
                case Run():
                    self._launch(step.last)
                case Record():
                    self._events[step.event] = self._record(Stream.LAUNCHES)
                    self._copy()
                case Wait(age=0):
                    self._wait(step, Stream.LAUNCHES)
                case _:
                    pass
        self._launch(math.inf)
        if self._copies:
            self._add(Kind.READY, Stream.LAUNCHES, 0)
            self._add(Kind.WAIT, Stream.LAUNCHES, self._record(Stream.COPIES))
        return tuple(self._steps)

    def _launch(self, last: float) -> None:
        """Launch all remaining nodes of launches before `last`."""
        while self._n_nodes < len(self._launches) and self._launches[self._n_nodes] < last:
            self._add(Kind.NODE, Stream.LAUNCHES, self._n_nodes)
            self._n_nodes += 1

    def _copy(self) -> None:
        """Lower the second lane up to a wait for an event not yet recorded."""
        while self._n_copied < len(self._copies):
            step = self._copies[self._n_copied]
            match step:
                case Wait():
                    if step.event not in self._events:
                        return
                    self._wait(step, Stream.COPIES)
                case Copy():
                    self._add(Kind.COPY, Stream.COPIES, next(self._transfers))
                case Record() if step.event in self._awaited:
                    self._events[step.event] = self._record(Stream.COPIES)
                case _:
                    pass
            self._n_copied += 1

    def _wait(self, step: Wait, stream: Stream) -> None:
        if step.event not in self._events:
            raise CaptureError(
                f"launches and copies of weights would wait for each other; {ADVICE}"
            )
        self._add(Kind.WAIT, stream, self._events[step.event])

    def _record(self, stream: Stream) -> int:
        event = self._n_events
        self._n_events += 1
        self._add(Kind.RECORD, stream, event)
        return event

    def _add(self, kind: Kind, stream: Stream, index: int) -> None:
        self._steps.append(Step(kind, stream, index))


def check_steps(
    program: Program,
    graph: NodeGraph,
    streaming: Streaming,
    streamed: StreamedGraph,
    steps: Sequence[Step],
) -> None:
    """Prove from streams and events only that no launch reads, and no copy overwrites, too early.

    Raises:
        CaptureError: as `streamed_copies.check_order`; or an event is recorded twice or waited for
            too early, no step marks the outputs as ready, or a capture of the steps would lack its
            fork or join.
    """
    edges, ready_after = step_order(graph.n_nodes, streamed, steps)
    found = dataclasses.replace(streamed, ready_after=ready_after)
    check_order(program, graph, streaming, found, edges)


def step_order(
    n_nodes: int, streamed: StreamedGraph, steps: Sequence[Step]
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Return the order that streams and events enforce.

    Returns:
        The edges between nodes, with copies numbered after the launches in the order of
        `streamed.copies`; and the nodes after which the outputs are ready.

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
        raise CaptureError("no event marks that the model's outputs are ready")
    return edges, tuple(sorted(ready))
