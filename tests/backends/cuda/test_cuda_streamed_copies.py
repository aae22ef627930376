"""Edges between copies of weights and launches: none may be missing, by proof and by result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from simulator import NEWEST_FIRST, OLDEST_FIRST

import offload
from offload.backends.captured.streamed_copies import StreamedGraph, check_copies, streamed_graph
from offload.backends.cuda import backend as cuda_backend
from offload.plan import NodeGraph, stream_weights, weight_demand

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from device_streaming import (
    GIVEN,
    expected_of,
    floor_on,
    poison_after_last_use,
    results,
    unmapped,
)

pytestmark = pytest.mark.slow


@dataclasses.dataclass
class Case:
    """The arguments of `check_copies`."""

    program: offload.Program
    graph: NodeGraph
    streaming: object
    streamed: StreamedGraph

    def check(self, **changed) -> None:
        arguments = {**vars(self), **changed}
        check_copies(**arguments)


@pytest.fixture(params=["whole weights", "tails"])
def case(request, deep, backend, simulator, monkeypatch) -> Case:
    has_tails = request.param == "tails"
    simulator.set_granularity(16 * 1024 if has_tails else 4096)  # the model has no 2 MiB
    if not has_tails:
        monkeypatch.setattr(type(backend.weights), "memory_layout", unmapped(backend))
    prepared = backend.prepare(deep.bound)
    streaming = stream_weights(
        weight_demand(
            prepared.program,
            [1000.0] * len(prepared.program.launches),
            prepared.bindings.stored.keys(),
        ),
        backend.weights.memory_layout(prepared.program),
        backend.weights.link(prepared.bound),
        floor_on(deep, backend) + (264 if has_tails else 124) * 1024,
        mapped_link=backend.weights.link(prepared.bound) if has_tails else None,
    )
    tails = [piece for piece in streaming.pieces if piece.streamed and piece.offset_bytes]
    assert bool(tails) == has_tails
    streamed = streamed_graph(prepared.program, prepared.graph, streaming)
    return Case(prepared.program, prepared.graph, streaming, streamed)


def without(case: Case, copy: int, side: str, edge: int) -> StreamedGraph:
    """The graph without one edge of one copy; a copy without successors ends last."""
    streamed = case.streamed
    one = streamed.copies[copy]
    edges = getattr(one, side)
    left = edges[:edge] + edges[edge + 1 :]
    if side == "before" and not left:
        left = (case.graph.n_nodes - 1,)
    changed = dataclasses.replace(one, **{side: left})
    copies = (*streamed.copies[:copy], changed, *streamed.copies[copy + 1 :])
    return dataclasses.replace(streamed, copies=copies)


def every_edge(streamed: StreamedGraph):
    return [
        (copy, side, edge)
        for copy, one in enumerate(streamed.copies)
        for side in ("after", "before")
        for edge in range(len(getattr(one, side)))
    ]


def test_both_kinds_of_copies_occur(case):
    kinds = {copy.for_next_pass for copy in case.streamed.copies}
    assert kinds == {False, True}
    case.check()


def test_each_edge_is_needed(case):
    """Each missing edge is detected, unless the launches' own order also enforces it."""
    seen, implied = 0, 0
    for copy, side, edge in every_edge(case.streamed):
        try:
            case.check(streamed=without(case, copy, side, edge))
        except offload.CaptureError:
            seen += 1
        else:
            assert side == "before"  # a launch that is later than one that waits for a later copy
            implied += 1
    assert seen > implied


def test_other_orders_of_copies_are_refused(case):
    copies = case.streamed.copies
    changed = [
        (copies[-1], *copies[:-1]),
        copies[:-1],
        (*copies[1:], copies[1]),
        tuple(dataclasses.replace(one, for_next_pass=True) for one in copies),
        tuple(reversed(copies)),
    ]
    for one in changed:
        with pytest.raises(offload.CaptureError):
            case.check(streamed=dataclasses.replace(case.streamed, copies=one))


def test_outputs_wait_for_every_node(case):
    with pytest.raises(offload.CaptureError, match="outputs would be ready"):
        case.check(streamed=dataclasses.replace(case.streamed, ready_after=()))


def test_a_cycle_is_refused(case):
    first = case.streamed.copies[0]
    changed = dataclasses.replace(first, after=(case.graph.n_nodes - 1,))
    streamed = dataclasses.replace(case.streamed, copies=(changed, *case.streamed.copies[1:]))
    with pytest.raises(offload.CaptureError, match="wait for each other"):
        case.check(streamed=streamed)


def test_a_weight_that_a_launch_was_not_seen_to_read_is_refused(case, deep, backend):
    piece = case.streaming.pieces[case.streaming.transfers[0].piece]
    touches = list(case.graph.touches)
    touches[piece.value] = (*touches[piece.value], case.graph.n_nodes - 1)
    graph = dataclasses.replace(case.graph, touches=tuple(touches))
    with pytest.raises(offload.CaptureError, match="was not seen to read"):
        streamed_graph(case.program, graph, case.streaming)


def test_overlapping_kernels_are_not_ordered(case, deep, backend):
    """A kernel after a programmatic edge may read weights before its predecessor has ended."""
    graph = dataclasses.replace(case.graph, overlapping=frozenset(case.graph.edges))
    with pytest.raises(offload.CaptureError, match="does not wait for"):
        case.check(graph=graph)
    streamed = streamed_graph(case.program, graph, case.streaming)
    case.check(graph=graph, streamed=streamed)
    assert set(streamed.ready_after) == set(range(graph.n_nodes))
    for one in streamed.copies:
        piece = case.streaming.pieces[case.streaming.transfers[one.transfer].piece]
        if not one.for_next_pass:  # else some order of its readers would replace the others
            assert one.before == graph.touches[piece.value]
    ended = dataclasses.replace(streamed, ready_after=case.streamed.ready_after)
    with pytest.raises(offload.CaptureError, match="outputs would be ready before every node"):
        case.check(graph=graph, streamed=ended)


@pytest.mark.parametrize("order", [NEWEST_FIRST, OLDEST_FIRST])
def test_results_tell_of_missing_edges(order, case, deep, backend, simulator, monkeypatch):
    """The simulator runs nodes in the worst order that edges allow, so results differ."""
    side = "after" if order == NEWEST_FIRST else "before"  # copies as early, as late as possible
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    wrong, refused = 0, 0
    for copy, its_side, edge in every_edge(case.streamed):
        if its_side != side:
            continue
        mutated = without(case, copy, side, edge)
        try:
            case.check(streamed=mutated)
        except offload.CaptureError:
            refused += 1
        monkeypatch.setattr(cuda_backend, "streamed_graph", lambda *_, found=mutated: found)
        budget = case.streaming.budget_bytes
        simulator.set_node_order(order)
        with deep.load(backend.name, weights_budget=budget, verify=False) as run:
            assert run.streaming.plan.transfers == case.streaming.transfers
            poison_after_last_use(backend, run)
            outcomes = [results(run(given)) for given in inputs]
        wrong += any(
            not torch.equal(got, wanted)
            for one, other in zip(outcomes, expected, strict=True)
            for got, wanted in zip(one, other, strict=True)
        )
    assert refused
    assert wrong
