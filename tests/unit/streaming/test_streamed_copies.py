"""Refusals by the check of copies among launches: each order that is not enforced, by name.

A chain of four launches, each of which reads a separate weight. Two places are shared: w2 and w3
are copied to where w0 and w1 lay, and w0 and w1 come back at the end, for the next execution.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from small_programs import OUT, WEIGHT, launch, program
from streaming_cases import LINK

from offload.backends.captured.streamed_copies import (
    StreamedCopy,
    StreamedGraph,
    check_copies,
    check_order,
    streamed_graph,
)
from offload.errors import CaptureError
from offload.plan import NodeGraph
from offload.plan.steps import Transfer, streaming_lanes
from offload.plan.streaming import Piece, Streaming, StreamingFloor
from offload.program import Program

N_BYTES = 4096


def reading(n_weights: int, n_launches: int) -> Program:
    """A Program whose launches read a weight each, in turns; it returns the last one's Value."""
    launches = [launch(i, [i % n_weights], n_weights + i) for i in range(n_launches)]
    roles = [WEIGHT] * n_weights + [OUT] * n_launches
    made = program(roles, launches, len(roles) - 1)
    values = (dataclasses.replace(one, name=f"w{one.index}") for one in made.values)
    return dataclasses.replace(made, values=tuple(values))


PROGRAM = reading(4, 4)
GRAPH = NodeGraph(4, ((0, 1), (1, 2), (2, 3)), ((0,), (1,), (2,), (3,)), launches=(0, 1, 2, 3))


def streaming_of(places: tuple[int, ...] = (0, 1, 0, 1)) -> Streaming:
    """Each weight in one piece at a place; w0 and w1 are copied for the next execution."""
    return Streaming(
        budget_bytes=4 * N_BYTES,
        memory_bytes=4 * N_BYTES,
        granule_bytes=N_BYTES,
        pieces=tuple(
            Piece(index, 0, N_BYTES, place * N_BYTES, True) for index, place in enumerate(places)
        ),
        lanes=streaming_lanes(
            4,
            [
                Transfer(0, 0, 2, -1),
                Transfer(1, 1, 3, -1),
                Transfer(2, 2, 0, 0),
                Transfer(3, 3, 1, 0),
            ],
        ),
        period_ns=0.0,
        compute_ns=0.0,
        roofline_ns=0.0,
        floor=StreamingFloor(0, 0, 0, 0, "", 0.0),
        link=LINK,
    )


STREAMING = streaming_of()
STREAMED = streamed_graph(PROGRAM, GRAPH, STREAMING)


def replaced(index: int, **changes: object) -> StreamedGraph:
    copies = list(STREAMED.copies)
    copies[index] = dataclasses.replace(copies[index], **changes)
    return dataclasses.replace(STREAMED, copies=tuple(copies))


def refusal(streamed: StreamedGraph = STREAMED, streaming: Streaming = STREAMING) -> str:
    with pytest.raises(CaptureError) as raised:
        check_copies(PROGRAM, GRAPH, streaming, streamed)
    found = re.fullmatch("(.*); load with a budget for all weights", str(raised.value))
    assert found is not None, raised.value
    return found[1]


def test_the_case_itself_is_enforced():
    assert (
        StreamedGraph(
            (
                StreamedCopy(2, (0,), (2,), False),
                StreamedCopy(3, (1,), (3,), False),
                StreamedCopy(0, (2,), (), True),
                StreamedCopy(1, (3,), (), True),
            ),
            (3,),
        )
        == STREAMED
    )
    check_copies(PROGRAM, GRAPH, STREAMING, STREAMED)


@pytest.mark.parametrize(
    "order",
    [
        (1, 0, 2, 3),  # not the order of transfers
        (2, 3, 0, 1),  # those for the next execution first
    ],
)
def test_copies_in_another_order_than_transfers(order):
    copies = tuple(STREAMED.copies[one] for one in order)
    said = refusal(dataclasses.replace(STREAMED, copies=copies))
    assert said.startswith("copies are not in the order of transfers")


def test_a_copy_for_the_next_execution_that_is_none():
    assert refusal(replaced(0, for_next_pass=True)).startswith(
        "copies are not in the order of transfers"
    )


def test_a_transfer_that_no_copy_makes():
    missing = dataclasses.replace(STREAMED, copies=STREAMED.copies[:-1])
    assert refusal(missing) == "the graph does not make each copy of a weight once"
    assert refusal(replaced(0, transfer=3)) == "the graph does not make each copy of a weight once"


def test_two_weights_for_the_next_execution_at_one_place():
    """The second would overwrite the first before it is read."""
    streaming = streaming_of((0, 0, 1, 1))
    said = refusal(streamed_copies_of_one_place(), streaming)
    assert said == (
        "w1 and w0 would be copied to one place before the execution that reads both begins"
    )
    with pytest.raises(CaptureError, match=r"w1 and w0 would be copied to one place"):
        streamed_graph(PROGRAM, GRAPH, streaming)


def streamed_copies_of_one_place() -> StreamedGraph:
    """Every copy after all launches that read its place, so that nothing else fails.

    w0 and w1 lie at one place, w2 and w3 at another.
    """
    return StreamedGraph(
        (
            StreamedCopy(2, (), (2,), False),
            StreamedCopy(3, (2,), (3,), False),
            StreamedCopy(0, (0, 1), (), True),
            StreamedCopy(1, (0, 1), (), True),
        ),
        (3,),
    )


# ---- a weight that is copied twice in an execution -----------------------------------------------

TWICE = reading(2, 4)
TWICE_GRAPH = NodeGraph(4, ((0, 1), (1, 2), (2, 3)), ((0, 2), (1, 3)), launches=(0, 1, 2, 3))


def twice(streamed: StreamedGraph | None = None) -> StreamedGraph:
    """w0 and w1 alternate at one place, each read by two launches; proved if one is given."""
    streaming = dataclasses.replace(
        streaming_of(),
        pieces=(Piece(0, 0, N_BYTES, 0, True), Piece(1, 0, N_BYTES, 0, True)),
        lanes=streaming_lanes(
            4,
            [
                Transfer(0, 0, 3, -1),
                Transfer(1, 1, 0, 0),
                Transfer(0, 2, 1, 0),
                Transfer(1, 3, 2, 0),
            ],
        ),
    )
    if streamed is None:
        return streamed_graph(TWICE, TWICE_GRAPH, streaming)
    check_copies(TWICE, TWICE_GRAPH, streaming, streamed)
    return streamed


def test_each_copy_stands_between_the_readers_of_what_it_overwrites_and_its_own():
    assert twice().copies == (
        StreamedCopy(1, (0,), (1,), False),
        StreamedCopy(2, (1,), (2,), False),
        StreamedCopy(3, (2,), (3,), False),
        StreamedCopy(0, (3,), (), True),
    )


@pytest.mark.parametrize(
    ("index", "side", "said"),
    [
        (0, "after", "the copy of w1 does not wait for node 0, which reads w0"),
        (1, "after", "the copy of w0 does not wait for node 1, which reads w1"),
        (2, "after", "the copy of w1 does not wait for node 2, which reads w0"),
        (3, "after", "the copy of w0 does not wait for node 3, which reads w1"),
        (0, "before", "node 1 reads w1 and does not wait for its copy"),
        (1, "before", "node 2 reads w0 and does not wait for its copy"),
        (2, "before", "node 3 reads w1 and does not wait for its copy"),
    ],
)
def test_each_edge_of_copies_made_twice_is_needed(index, side, said):
    streamed = twice()
    copies = list(streamed.copies)
    copies[index] = dataclasses.replace(copies[index], **{side: ()})
    with pytest.raises(CaptureError, match=said):
        twice(dataclasses.replace(streamed, copies=tuple(copies)))


def test_a_reader_that_does_not_wait():
    assert refusal(replaced(0, before=(3,))) == "node 2 reads w2 and does not wait for its copy"


def test_a_copy_that_does_not_wait():
    assert refusal(replaced(0, after=())) == (
        "the copy of w2 does not wait for node 0, which reads w0 at the same place"
    )


def test_outputs_that_do_not_wait():
    early = dataclasses.replace(STREAMED, ready_after=(2,))
    assert refusal(early) == "the outputs would be ready before every node has ended"


def test_a_cycle():
    assert refusal(replaced(0, after=(2,))) == (
        "launches and copies of weights would wait for each other"
    )


def test_copies_that_do_not_wait_for_each_other():
    """On a device whose copies need not form one chain."""
    edges = [*GRAPH.edges, (0, 4), (4, 2), (1, 5), (5, 3)]
    with pytest.raises(CaptureError, match=r"^copy 1 does not wait for the one before it; load"):
        check_order(PROGRAM, GRAPH, STREAMING, STREAMED, edges)


@pytest.mark.parametrize(("launch", "whose"), [(1, "launch 1"), (-1, "no launch")])
def test_a_weight_that_its_launch_was_not_seen_to_read(launch, whose):
    graph = dataclasses.replace(GRAPH, launches=(0, 1, launch, 3))
    with pytest.raises(CaptureError, match=f"node 2 of {whose} holds the address of w2.*; load"):
        streamed_graph(PROGRAM, graph, STREAMING)
