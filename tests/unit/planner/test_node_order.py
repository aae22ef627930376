"""Lanes of launches as edges of a graph: the order kept, and the checker's refusals."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.plan import NodeGraph, graph_lifetimes, place_values
from offload.plan.check_node_order import check_node_order
from offload.plan.lane_schedule import schedule_lanes
from offload.plan.node_order import (
    earlier_nodes,
    lane_edges,
    lane_of_launches,
    node_conflicts,
)
from offload.plan.plan import Place
from offload.plan.steps import Lane, LaneKind, Record, Run, Wait
from offload.plan.topology import CostTable, Machine
from offload.program import Launch, Operator, Overlap, Program, Role, TensorView, Value
from offload.program.structure import Structure

MACHINE = Machine("cuda", "test", 0, 256, CostTable())
IN, ACT, OUT, SCRATCH = Role.INPUT, Role.ACTIVATION, Role.OUTPUT, Role.SCRATCH


def program_of(roles, touches, size_bytes=512):
    """A Program of launches that read and write Values by number."""
    values = tuple(
        Value(index, role, (size_bytes,), (1,), "uint8", size_bytes, f"v{index}")
        for index, role in enumerate(roles)
    )
    views = [TensorView(one.index, 0, one.shape, one.strides, "uint8") for one in values]
    launches = tuple(
        Launch(
            index,
            Operator("aten::sin"),
            tuple(views[one] for one in reads),
            (),
            tuple(reads),
            tuple(writes),
            False,
            None,
            False,
            f"model.py:{index + 1}",
        )
        for index, (reads, writes) in enumerate(touches)
    )
    structure = Structure("tuple")
    return Program("cuda", values, launches, (), (), structure, structure)


def chain_graph(program, n_nodes_of, extra=()):
    """A captured chain with this many nodes per launch; `extra` touches by (node, Value)."""
    launches = [index for index, count in enumerate(n_nodes_of) for _ in range(count)]
    return chain_of(program, launches, extra)


def chain_of(program, launches, extra=()):
    touches = [
        tuple(
            node
            for node, launch in enumerate(launches)
            if (
                launch >= 0
                and value.index
                in (*program.launches[launch].reads, *program.launches[launch].writes)
            )
            or (node, value.index) in extra
        )
        for value in program.values
    ]
    edges = tuple(itertools.pairwise(range(len(launches))))
    return NodeGraph(len(launches), edges, tuple(touches), launches=tuple(launches))


def laned(program, graph, n_lanes=4, apart=frozenset()):
    """The graph in lanes, and a Plan of it."""
    conflicts = node_conflicts(program, graph, apart)
    schedule = schedule_lanes([1000.0] * len(program.launches), conflicts, n_lanes)
    edges = lane_edges(program, graph, schedule.lanes)
    found = dataclasses.replace(graph, edges=edges)
    plan = place_values(program, MACHINE, lifetimes=graph_lifetimes(program, found))
    return found, dataclasses.replace(plan, launch_lanes=schedule.lanes)


def before(graph):
    _, earlier = earlier_nodes(graph)
    return {
        (one, other)
        for one, other in itertools.product(range(graph.n_nodes), repeat=2)
        if earlier[other] >> one & 1
    }


# x -> a -> b, x -> c -> d, (b, d) -> y
TOWERS = program_of(
    [IN, ACT, ACT, ACT, ACT, OUT],
    [([0], [1]), ([1], [2]), ([0], [3]), ([3], [4]), ([2, 4], [5])],
)


def test_branches_are_left_open_and_joined():
    graph, plan = laned(TOWERS, chain_graph(TOWERS, [1, 2, 1, 1, 1]))
    # launches: 0, 1 (two nodes: 1 and 2), 2, 3, 4
    assert set(graph.edges) == {(0, 1), (1, 2), (3, 4), (2, 5), (4, 5)}
    check_node_order(TOWERS, plan, graph)


def test_one_lane_keeps_the_captured_chain():
    graph, plan = laned(TOWERS, chain_graph(TOWERS, [1, 2, 1, 1, 1]), n_lanes=1)
    assert graph.edges == tuple(itertools.pairwise(range(6)))
    check_node_order(TOWERS, plan, graph)


def test_a_launch_without_nodes_orders_what_stands_around_it():
    program = program_of([IN, ACT, ACT, ACT, OUT], [([0], [1]), ([1], [2]), ([2], [3]), ([3], [4])])
    graph, _ = laned(program, chain_graph(program, [1, 0, 1, 1]))
    assert graph.edges == ((0, 1), (1, 2))


def test_shared_scratch_memory_keeps_launches_in_order_unless_it_is_apart():
    program = program_of([IN, OUT, OUT, SCRATCH], [([0], [1]), ([0], [2])])
    captured = chain_graph(program, [1, 1], extra=[(0, 3), (1, 3)])
    graph, plan = laned(program, captured)
    assert graph.edges == ((0, 1),)
    check_node_order(program, plan, graph)
    graph, plan = laned(program, captured, apart=frozenset([3]))
    assert graph.edges == ()
    with pytest.raises(PlanError, match=r"node 0 of launch 0 .*node 1 of launch 1 .*both touch v3"):
        check_node_order(program, plan, graph)  # as no scratch was given to them


def test_a_node_that_no_launch_made_waits_for_all_and_all_for_it():
    program = program_of([IN, OUT, OUT, OUT], [([0], [1]), ([0], [2]), ([0], [3])])
    graph, plan = laned(program, chain_of(program, [0, 1, -1, 2]))
    assert {(0, 2), (1, 2), (2, 3)} <= before(graph)
    check_node_order(program, plan, graph)
    free = dataclasses.replace(graph, edges=((0, 2), (2, 3)))
    with pytest.raises(PlanError, match="of no launch and node 1 of launch 1"):
        check_node_order(program, plan, free)


def test_launches_before_and_after_a_node_that_no_launch_made_conflict():
    program = program_of([IN, OUT, OUT, OUT], [([0], [1]), ([0], [2]), ([0], [3])])
    assert node_conflicts(program, chain_of(program, [0, -1, 1, 2])) == ((0, 1), (0, 2))
    assert node_conflicts(program, chain_of(program, [0, 1, -1, 2])) == ((0, 2), (1, 2))


def test_a_touch_that_the_program_does_not_know_is_taken_for_a_write():
    program = program_of([IN, OUT, OUT], [([0], [1]), ([], [2])])
    captured = chain_graph(program, [1, 1], extra=[(1, 0)])  # the second one names the input
    graph, plan = laned(program, captured)
    assert graph.edges == ((0, 1),)
    with pytest.raises(PlanError, match="both touch v0"):
        check_node_order(program, plan, dataclasses.replace(graph, edges=()))


def test_memory_that_is_never_written_keeps_its_first_launch_first():
    """As in `launch_conflicts`: the first launch that touches a Value makes it."""
    program = program_of([ACT, OUT, OUT], [([0], [1]), ([0], [2])])
    graph, plan = laned(program, chain_graph(program, [1, 1]))
    assert graph.edges == ((0, 1),)
    check_node_order(program, plan, graph)
    with pytest.raises(PlanError, match="both touch v0"):
        check_node_order(program, plan, dataclasses.replace(graph, edges=()))


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        (([0], [0]), ([1], [2]), True),
        (([0], [2]), ([1], [1]), True),
        (([0], [0]), ([1], [1]), True),
        (([0], [2]), ([1], [3]), False),
    ],
)
def test_inputs_that_share_memory_are_ordered_if_either_is_written(first, second, is_refused):
    alone = program_of([IN, IN, OUT, OUT], [first, second])
    inputs = tuple(
        TensorView(one.index, 0, one.shape, one.strides, "uint8") for one in alone.values
    )
    program = dataclasses.replace(alone, inputs=inputs[:2], overlaps=(Overlap(0, 1, 0),))
    graph, plan = laned(program, chain_graph(program, [1, 1]))
    assert graph.edges == (((0, 1),) if is_refused else ())
    check_node_order(program, plan, graph)
    free = dataclasses.replace(graph, edges=())
    if is_refused:
        with pytest.raises(PlanError, match="and touch inputs that share memory"):
            check_node_order(program, plan, free)


def test_launches_that_draw_from_one_generator_are_ordered():
    program = program_of([OUT, OUT], [([], [0]), ([], [1])])
    drawing = tuple(dataclasses.replace(one, random=True) for one in program.launches)
    graph, plan = laned(program, chain_graph(program, [1, 1]))
    assert graph.edges == ()
    check_node_order(program, plan, graph)
    with pytest.raises(PlanError, match="both have the effect generator"):
        check_node_order(dataclasses.replace(program, launches=drawing), plan, graph)


def test_values_that_may_exist_at_once_share_no_bytes():
    graph, plan = laned(TOWERS, chain_graph(TOWERS, [1, 1, 1, 1, 1]))
    places = list(plan.places)
    places[3] = places[1]  # of the two branches
    wrong = dataclasses.replace(plan, places=tuple(places))
    with pytest.raises(PlanError, match=r"%1 \(v1\) and %3 \(v3\) lie in the same bytes"):
        check_node_order(TOWERS, wrong, graph)


def test_values_that_follow_one_another_may():
    program = program_of([IN, ACT, ACT, ACT, OUT], [([0], [1]), ([1], [2]), ([2], [3]), ([3], [4])])
    graph = chain_graph(program, [1] * 4)
    plan = place_values(program, MACHINE, lifetimes=graph_lifetimes(program, graph))
    places = list(plan.places)
    places[3] = Place(places[1].slot, places[1].offset_bytes)
    check_node_order(program, dataclasses.replace(plan, places=tuple(places)), graph)


def test_nodes_that_wait_for_one_another_are_refused():
    graph, plan = laned(TOWERS, chain_graph(TOWERS, [1] * 5))
    with pytest.raises(PlanError, match="wait for one another"):
        check_node_order(TOWERS, plan, dataclasses.replace(graph, edges=((0, 1), (1, 0))))


def test_each_launch_is_on_the_lane_that_runs_it():
    lanes = [
        Lane(LaneKind.LAUNCHES, (Run(0, 1), Record(0), Run(3, 4))),
        Lane(LaneKind.LAUNCHES, (Wait(0), Run(1, 3))),
    ]
    assert lane_of_launches(4, lanes) == (0, 1, 1, 0)
    with pytest.raises(PlanError, match="no lane runs launch 4"):
        lane_of_launches(5, lanes)


def test_lanes_that_leave_a_launch_out_are_refused():
    graph = chain_graph(TOWERS, [1] * 5)
    with pytest.raises(PlanError, match="each of 5 launches once"):
        lane_edges(TOWERS, graph, [Lane(LaneKind.LAUNCHES, (Run(0, 4),))])


@st.composite
def programs(draw):
    """Launches that each read some earlier Values, write one, and have one to three nodes."""
    n_launches = draw(st.integers(1, 12))
    roles, touches = [IN, IN], []
    for _ in range(n_launches):
        reads = draw(st.lists(st.integers(0, len(roles) - 1), min_size=1, max_size=3, unique=True))
        in_place = draw(st.booleans()) and any(roles[one] is ACT for one in reads)
        if in_place:
            touches.append((reads, [next(one for one in reads if roles[one] is ACT)]))
        else:
            roles.append(draw(st.sampled_from([ACT, ACT, OUT])))
            touches.append((reads, [len(roles) - 1]))
    roles.append(SCRATCH)
    program = program_of(roles, touches)
    counts = [draw(st.integers(0, 3)) for _ in range(n_launches)]
    launches = [index for index, count in enumerate(counts) for _ in range(count)]
    if launches and draw(st.booleans()):
        launches.insert(draw(st.integers(0, len(launches))), -1)
    n_nodes = len(launches)
    extra = (
        draw(st.lists(st.tuples(st.integers(0, n_nodes - 1), st.just(len(roles) - 1)), max_size=3))
        if n_nodes
        else []
    )
    extra = [one for one in extra if launches[one[0]] >= 0]
    return program, chain_of(program, launches, extra)


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(1, 4))
def test_random_graphs_pass_the_checker_with_the_fewest_edges(made, n_lanes):
    program, captured = made
    graph, plan = laned(program, captured, n_lanes)
    check_node_order(program, plan, graph)
    assert before(graph) <= before(captured)  # no order beyond that of the capture
    _, earlier = earlier_nodes(graph)
    for one, other in graph.edges:  # no edge is implied by others
        others = [start for start, end in graph.edges if end == other and start != one]
        assert not any(earlier[start] >> one & 1 for start in others)
    if n_lanes == 1:
        launches = [graph.launches[node] for node in range(graph.n_nodes)]
        assert graph.edges == tuple(itertools.pairwise(range(len(launches))))


@settings(max_examples=30, deadline=None)
@given(programs())
def test_nodes_of_a_launch_and_of_launches_in_conflict_stay_in_order(made):
    """On as many lanes as there are launches."""
    program, captured = made
    n_lanes = max(2, len(program.launches))
    conflicts = node_conflicts(program, captured)
    pairs = {
        (one, other)
        for one, other in itertools.product(range(captured.n_nodes), repeat=2)
        if captured.launches[one] == captured.launches[other] and one < other
    }
    graph, _ = laned(program, captured, n_lanes)
    ordered = before(graph)
    for one, other in pairs:  # nodes of one launch stay in order
        assert (one, other) in ordered
    for early, late in conflicts:
        for one, other in itertools.product(range(captured.n_nodes), repeat=2):
            if captured.launches[one] == early and captured.launches[other] == late:
                assert (one, other) in ordered
