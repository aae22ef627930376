"""Conflicts of a Program's launches: sufficient for its bytes and effects on any lanes."""

import dataclasses

import networkx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans_in_lanes import TOWERS, in_lanes, programs
from small_programs import ACT, IN, MACHINE, OUT, WEIGHT, launch, program

from offload.errors import PlanError
from offload.plan import check_order, check_plan, place_values, value_lifetimes
from offload.plan.lane_schedule import schedule_lanes
from offload.plan.launch_conflicts import launch_conflicts
from offload.plan.lifetimes import lane_graph
from offload.plan.steps import Record, Run, Wait
from offload.program import Opaque, Overlap, Program

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_lanes(one: Program, n_lanes: int, launch_ns=None) -> None:
    """A Program's lanes, with its Values placed for them, pass both checks of Plans."""
    costs = [10.0] * len(one.launches) if launch_ns is None else launch_ns
    found = schedule_lanes(costs, launch_conflicts(one), n_lanes)
    plan = place_values(one, MACHINE, lifetimes=value_lifetimes(one, found.lanes))
    plan = in_lanes(plan, *(lane.steps for lane in found.lanes))
    check_plan(one, plan)
    check_order(one, plan)


def test_towers():
    assert launch_conflicts(TOWERS) == ((0, 1), (1, 4), (2, 3), (3, 4))
    check_lanes(TOWERS, 2)
    found = schedule_lanes([10.0] * 5, launch_conflicts(TOWERS), 2)
    assert found.predicted_ns == 30
    assert len(found.lanes) == 2


def test_what_is_written_again_comes_behind_its_readers():
    changed = launch(3, [1], 1)  # in place
    one = program(
        [IN, ACT, ACT, ACT, OUT],
        [launch(0, [0], 1), launch(1, [1], 2), launch(2, [1], 3), changed, launch(4, [1, 2, 3], 4)],
        4,
    )
    conflicts = launch_conflicts(one)
    assert {(1, 3), (2, 3), (0, 3), (3, 4)} <= set(conflicts)
    assert (1, 2) not in conflicts
    check_lanes(one, 3)


def test_draws_keep_their_order():
    draws = {"random": True}
    one = program(
        [IN, ACT, ACT, OUT],
        [launch(0, [0], 1, **draws), launch(1, [0], 2, **draws), launch(2, [1, 2], 3)],
        3,
    )
    assert (0, 1) in launch_conflicts(one)
    check_lanes(one, 2)


def test_a_guard_comes_before_what_callers_see():
    one = program(
        [IN, ACT, OUT, ACT],
        [launch(0, [0], 1, guard=3.0), launch(1, [0], 2), launch(2, [0], 3)],
        2,
    )
    assert launch_conflicts(one) == ((0, 1),)
    check_lanes(one, 3)


def test_a_guard_comes_before_draws():
    """A generator has not advanced where an execution ends at a guard."""
    one = program(
        [IN, ACT, ACT, OUT],
        [launch(0, [0], 1, guard=3.0), launch(1, [0], 2, random=True), launch(2, [1, 2], 3)],
        3,
    )
    assert (0, 1) in launch_conflicts(one)
    check_lanes(one, 3)
    apart = [Run(0, 1), Wait(0), Run(2, 3)], [Run(1, 2), Record(0)]
    plan = place_values(one, MACHINE, operator_allocated={1, 2})
    with pytest.raises(PlanError, match="guard"):
        check_order(one, in_lanes(plan, *apart))


def test_inputs_that_share_memory_are_one():
    """The second input is read before the first is written, which it overlaps."""
    one = program(
        [IN, IN, ACT, OUT],
        [launch(0, [1], 2), launch(1, [0], 0), launch(2, [0, 2], 3)],
        3,
    )
    one = dataclasses.replace(
        one,
        inputs=(one.launches[1].arguments[0], one.launches[0].arguments[0]),
        overlaps=(Overlap(0, 1, 8),),
    )
    assert (0, 1) in launch_conflicts(one)
    check_lanes(one, 2)
    apart = dataclasses.replace(one, overlaps=())
    assert (0, 1) not in launch_conflicts(apart)
    found = schedule_lanes([10.0] * 3, launch_conflicts(apart), 2)
    plan = place_values(apart, MACHINE, lifetimes=value_lifetimes(apart, found.lanes))
    plan = in_lanes(plan, *(lane.steps for lane in found.lanes))
    check_order(apart, plan)
    with pytest.raises(PlanError, match="the memory of"):
        check_order(one, plan)


def test_a_launch_reads_memory_that_it_writes_through_another_input():
    writes = dataclasses.replace(launch(0, [0, 1], 0), results=())
    one = program([IN, IN, ACT, OUT], [writes, launch(1, [1], 2), launch(2, [0, 2], 3)], 3)
    one = dataclasses.replace(one, inputs=writes.arguments, overlaps=(Overlap(0, 1, 8),))
    assert launch_conflicts(one) == ((0, 1), (0, 2), (1, 2))
    check_lanes(one, 2)
    apart = in_lanes(place_values(one, MACHINE), [Run(0, 1)], [Run(1, 3)])
    with pytest.raises(PlanError, match="the memory of"):
        check_order(one, apart)


def test_unseen_work_keeps_its_order_with_all():
    unseen = dataclasses.replace(launch(1, [0], 2), callee=Opaque(0, "a test"))
    one = program([IN, ACT, ACT, OUT], [launch(0, [0], 1), unseen, launch(2, [0], 3)], 3)
    assert launch_conflicts(one) == ((0, 1), (1, 2))
    check_lanes(one, 3)


@st.composite
def programs_with_effects(draw) -> Program:
    """Some launches draw, are guarded, or write a weight or another launch's result."""
    one = draw(programs())
    launches = []
    for each in one.launches:
        kind = draw(st.sampled_from(["plain", "plain", "random", "guard", "writes", "opaque"]))
        if kind == "random":
            launches.append(dataclasses.replace(each, random=True))
        elif kind == "guard":
            launches.append(dataclasses.replace(each, guard=1.0))
        elif kind == "writes":
            launches.append(dataclasses.replace(each, writes=(*each.writes, each.reads[0])))
        elif kind == "opaque":
            launches.append(dataclasses.replace(each, callee=Opaque(0, "a test")))
        else:
            launches.append(each)
    return dataclasses.replace(one, launches=tuple(launches))


@given(programs_with_effects(), st.integers(1, 4), st.data())
@SLOW
def test_programs_on_lanes_pass_the_checks(one, n_lanes, data):
    size = len(one.launches)
    costs = data.draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))
    check_lanes(one, n_lanes, [float(cost) for cost in costs])


@given(programs_with_effects(), st.data())
@SLOW
def test_a_conflict_that_is_left_out_is_missed(one, data):
    """Where nothing else orders the two launches, and they are on different lanes."""
    conflicts = launch_conflicts(one)
    if not conflicts:
        return
    left_out = data.draw(st.sampled_from(conflicts))
    rest = [pair for pair in conflicts if pair != left_out]
    reached = {left_out[0]}
    for first, second in rest:  # in order of the first one
        if first in reached:
            reached.add(second)
    if left_out[1] in reached or any(second == left_out[1] for _, second in rest):
        return
    found = schedule_lanes([10.0] * len(one.launches), rest, 8)
    graph = networkx.DiGraph(lane_graph(one, found.lanes).edges)
    if left_out[1] in graph and left_out[0] in networkx.ancestors(graph, left_out[1]):
        return  # through a lane with both, or launches between them
    # All at separate places, so that only the Program's own order matters.
    plan = place_values(one, MACHINE, operator_allocated={value.index for value in one.values})
    with pytest.raises(PlanError):
        check_order(one, in_lanes(plan, *(lane.steps for lane in found.lanes)))


def test_weights_are_read_side_by_side():
    one = program(
        [IN, WEIGHT, ACT, ACT, OUT],
        [launch(0, [0, 1], 2), launch(1, [0, 1], 3), launch(2, [2, 3], 4)],
        4,
    )
    assert launch_conflicts(one) == ((0, 2), (1, 2))
