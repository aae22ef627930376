"""The check of a Plan: any lanes, over bytes of slots and effects.

For a single lane, lifetimes are equivalent.
"""

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans_in_lanes import JOINED, TOWERS, in_lanes, is_right, programs
from small_programs import ACT, IN, MACHINE, OUT, launch, program

from offload.errors import PlanError
from offload.plan import Place, Plan, check_order, check_plan, place_values
from offload.plan.steps import Lane, LaneKind, Record, Run, Wait
from offload.program import Program

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(programs(), st.integers(0, 1 << 30))
@SLOW
def test_of_one_lane_lifetimes_and_steps_tell_the_same(one, seed):
    plan = place_values(one, MACHINE)
    check_plan(one, plan)
    check_order(one, plan)
    draw = random.Random(seed)
    inner = [index for index, value in enumerate(one.values) if value.role is ACT]
    inner = [index for index in inner if plan.places[index] is not None]
    for _ in range(8):
        places = list(plan.places)
        for index in inner:
            if draw.random() < 0.3:
                at = 64 * draw.randrange(max(1, plan.feature_map_bytes // 64))
                places[index] = Place(places[index].slot, at)
        moved = dataclasses.replace(plan, places=tuple(places))
        assert is_right(check_plan, one, moved) == is_right(check_order, one, moved)


# ---- lanes ---------------------------------------------------------------------------------------


def apart(plan: Plan) -> Plan:
    """Each activation at a separate place."""
    slot = plan.feature_map.index
    places = list(plan.places)
    for number, index in enumerate((1, 2, 3, 4)):
        places[index] = Place(slot, 64 * number)
    slots = list(plan.slots)
    slots[slot] = dataclasses.replace(slots[slot], size_bytes=4 * 64)
    return dataclasses.replace(plan, places=tuple(places), slots=tuple(slots))


def test_two_lanes_that_share_no_bytes():
    check_order(TOWERS, in_lanes(apart(place_values(TOWERS, MACHINE)), *JOINED))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([Run(0, 4)], "each of 5 launches once"),
        ([Run(0, 2), Run(3, 4), Run(2, 3), Run(4, 5)], "launches 2 and 3 are in the wrong order"),
    ],
)
def test_a_single_lane_that_was_given_runs_each_launch_in_order(steps, said):
    plan = place_values(TOWERS, MACHINE)
    whole = dataclasses.replace(plan, launch_lanes=(Lane(LaneKind.LAUNCHES, (Run(0, 5),)),))
    check_plan(TOWERS, whole)
    wrong = dataclasses.replace(plan, launch_lanes=(Lane(LaneKind.LAUNCHES, tuple(steps)),))
    with pytest.raises(PlanError, match=said):
        check_plan(TOWERS, wrong)


def test_places_of_one_lane_are_wrong_for_two():
    plan = in_lanes(place_values(TOWERS, MACHINE), *JOINED)
    with pytest.raises(PlanError, match="nothing orders the two"):
        check_plan(TOWERS, plan)


@pytest.mark.parametrize(
    ("lane", "step", "said"),
    [(0, 1, "launch 4. would not find what it reads"), (1, 0, "launch 3.*launch 4")],
)
def test_each_wait_is_needed(lane, step, said):
    """On what the other tower has made; and before the next execution overwrites it."""
    steps = [list(one) for one in JOINED]
    del steps[lane][step]
    plan = in_lanes(apart(place_values(TOWERS, MACHINE)), *steps)
    with pytest.raises(PlanError, match=said):
        check_order(TOWERS, plan)


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ({}, {}, False),
        ({"random": True}, {"random": True}, True),  # one generator: the order of draws
        ({"random": True}, {}, False),
        ({"guard": True}, {"guard": True}, True),
    ],
)
def test_effects_keep_their_order(first, second, is_refused):
    two = program(
        [IN, ACT, ACT, OUT],
        [launch(0, [0], 1, **first), launch(1, [0], 2, **second), launch(2, [1, 2], 3)],
        3,
    )
    plan = apart_of(two, (1, 2))
    lanes = [Run(0, 1), Wait(0), Run(2, 3), Record(1)], [Wait(1, age=1), Run(1, 2), Record(0)]
    assert is_right(check_order, two, in_lanes(plan, *lanes)) != is_refused


def apart_of(one: Program, values: tuple[int, ...]) -> Plan:
    plan = place_values(one, MACHINE)
    slot = plan.feature_map.index
    places = list(plan.places)
    for number, index in enumerate(values):
        places[index] = Place(slot, 64 * number)
    slots = list(plan.slots)
    slots[slot] = dataclasses.replace(slots[slot], size_bytes=64 * len(values))
    return dataclasses.replace(plan, places=tuple(places), slots=tuple(slots))


def test_a_guard_stays_before_what_callers_can_see():
    """A write to an input beside a guard might be seen though the execution ends at the guard."""
    two = program(
        [IN, ACT, OUT],
        [launch(0, [0], 1, guard=True), launch(1, [0], 2)],
        2,
    )
    plan = apart_of(two, (1,))
    lanes = [Wait(1, age=1), Run(0, 1), Record(0)], [Wait(0), Run(1, 2), Record(1)]
    check_order(two, in_lanes(plan, *lanes))
    lanes = [Run(0, 1)], [Run(1, 2)]
    with pytest.raises(PlanError, match="guard, which"):
        check_order(two, in_lanes(plan, *lanes))
