"""Values whose lifetimes are a partial order: values that may exist at once share no bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from plans_in_lanes import JOINED, TOWERS, in_lanes, is_right, programs
from small_programs import MACHINE

from offload.errors import PlanError
from offload.plan import Lifetime, Place, check_order, check_plan, place_values, value_lifetimes
from offload.plan.place_lifetimes import check_lifetimes, place_lifetimes
from offload.plan.steps import Lane, LaneKind, Record, Run, Wait
from offload.program import Program, Role

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def partial_lifetimes(draw, most=9) -> tuple[list[Lifetime], list[int]]:
    """Values of two or three chains, each touched by one or more of them."""
    n_chains = draw(st.integers(2, 3))
    chain = st.tuples(st.integers(0, 5), st.integers(0, 6))
    lifetimes = []
    for _ in range(draw(st.integers(1, most))):
        chains = [
            (begin, end if end > begin else 0)
            for begin, end in draw(st.lists(chain, min_size=n_chains, max_size=n_chains))
        ]
        lifetimes.append(Lifetime(*chains[0], tuple(chains[1:])))
    return lifetimes, [draw(st.integers(0, 40)) for _ in lifetimes]


def conflicts(lifetimes, sizes_bytes):
    """Pairs that may exist at once, by the definition."""
    takes = [
        index
        for index, one in enumerate(lifetimes)
        if sizes_bytes[index] and any(last for _, last in one.chains)
    ]
    return [
        (one, other)
        for one, other in itertools.combinations(takes, 2)
        if not lifetimes[one].precedes(lifetimes[other])
        and not lifetimes[other].precedes(lifetimes[one])
    ]


def smallest_arena_bytes(lifetimes, sizes_bytes) -> int:
    """The least arena, by a solver."""
    model = cp_model.CpModel()
    most = sum(sizes_bytes)
    arena = model.new_int_var(0, most, "")
    begins = [model.new_int_var(0, most, "") for _ in sizes_bytes]
    for index, one in enumerate(lifetimes):
        if any(last for _, last in one.chains):
            model.add(begins[index] + sizes_bytes[index] <= arena)
    for one, other in conflicts(lifetimes, sizes_bytes):
        below = model.new_bool_var("")
        model.add(begins[one] + sizes_bytes[one] <= begins[other]).only_enforce_if(below)
        model.add(begins[other] + sizes_bytes[other] <= begins[one]).only_enforce_if(~below)
    model.minimize(arena)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value)


@given(partial_lifetimes(), st.sampled_from([1, 8, 64]))
@SLOW
def test_what_may_exist_at_once_shares_no_bytes(case, alignment_bytes):
    lifetimes, sizes_bytes = case
    found = place_lifetimes(lifetimes, sizes_bytes, alignment_bytes=alignment_bytes)
    assert all(at % alignment_bytes == 0 for at in found.offsets_bytes)
    for one, other in conflicts(lifetimes, sizes_bytes):
        here, there = found.offsets_bytes[one], found.offsets_bytes[other]
        assert here + sizes_bytes[one] <= there or there + sizes_bytes[other] <= here
    assert found.lower_bound_bytes <= found.arena_bytes
    assert found == place_lifetimes(lifetimes, sizes_bytes, alignment_bytes=alignment_bytes)


@pytest.mark.parametrize("sizes_bytes", [(64,), (192, 64), (64, 192)])
def test_of_values_that_follow_one_another_the_largest_is_the_bound(sizes_bytes):
    lifetimes = [
        Lifetime(2 * at, 2 * at + 1, ((2 * at, 2 * at + 1),)) for at in range(len(sizes_bytes))
    ]
    found = place_lifetimes(lifetimes, list(sizes_bytes), alignment_bytes=64)
    assert found.lower_bound_bytes == found.arena_bytes == max(sizes_bytes)


@given(partial_lifetimes())
@settings(SLOW, max_examples=60)
def test_few_values_are_placed_as_a_solver_places_them(case):
    lifetimes, sizes_bytes = case
    found = place_lifetimes(lifetimes, sizes_bytes, alignment_bytes=1)
    assert found.lower_bound_bytes <= smallest_arena_bytes(lifetimes, sizes_bytes)
    assert found.arena_bytes == smallest_arena_bytes(lifetimes, sizes_bytes)


@given(partial_lifetimes(), st.data())
@SLOW
def test_the_checker_agrees_with_comparing_every_two(case, data):
    lifetimes, sizes_bytes = case
    offsets = [data.draw(st.integers(0, 120)) for _ in sizes_bytes]
    wrong = any(
        offsets[one] < offsets[other] + sizes_bytes[other]
        and offsets[other] < offsets[one] + sizes_bytes[one]
        for one, other in conflicts(lifetimes, sizes_bytes)
    )
    if wrong:
        with pytest.raises(PlanError, match="while both may exist"):
            check_lifetimes(lifetimes, sizes_bytes, offsets)
    else:
        check_lifetimes(lifetimes, sizes_bytes, offsets)


def test_nothing_to_place():
    never = Lifetime(0, 0, ((0, 0),))
    found = place_lifetimes([never, never], [8, 0], alignment_bytes=1)
    assert (found.offsets_bytes, found.arena_bytes, found.method) == ((0, 0), 0, "empty")


def test_bad_input_is_refused():
    one = Lifetime(0, 1, ((0, 1),))
    with pytest.raises(PlanError, match="power of two"):
        place_lifetimes([one], [8], alignment_bytes=3)
    with pytest.raises(PlanError, match="negative size"):
        place_lifetimes([one], [-8], alignment_bytes=1)
    with pytest.raises(PlanError, match=r"2\^63 - 1"):
        place_lifetimes([one, one], [2**62, 2**62], alignment_bytes=1)
    with pytest.raises(PlanError, match="outside"):
        check_lifetimes([one], [8], [-1])


# ---- of lanes ------------------------------------------------------------------------------------


@st.composite
def programs_in_lanes(draw) -> tuple[Program, list[list]]:
    """Launches dealt to lanes, which wait for their operands and for the preceding execution."""
    one = draw(programs())
    n_lanes = draw(st.integers(2, 3))
    lane_of = [draw(st.integers(0, n_lanes - 1)) for _ in one.launches]
    makers = {launch.writes[0]: launch.index for launch in one.launches}
    steps: list[list] = [[] for _ in range(n_lanes)]
    n_launches = len(one.launches)
    for lane in range(n_lanes):  # events after those of launches mark a lane's end
        steps[lane] = [Wait(n_launches + other, age=1) for other in range(n_lanes) if other != lane]
    for launch in one.launches:
        lane = lane_of[launch.index]
        for value in launch.reads:
            maker = makers.get(value)
            if maker is not None and lane_of[maker] != lane:
                steps[lane].append(Wait(maker))
        steps[lane] += [Run(launch.index, launch.index + 1), Record(launch.index)]
    for lane in range(n_lanes):
        steps[lane].append(Record(n_launches + lane))
    return one, steps


@given(programs_in_lanes(), st.randoms(use_true_random=False))
@SLOW
def test_places_of_lanes_pass_the_checker_of_steps_and_others_fail_as_lifetimes_say(case, draw):
    one, steps = case
    lanes = [Lane(LaneKind.LAUNCHES, tuple(each)) for each in steps]
    plan = place_values(one, MACHINE, lifetimes=value_lifetimes(one, lanes))
    check_plan(one, in_lanes(plan, *steps))
    slot = plan.feature_map.index
    inner = [
        value.index
        for value in one.values
        if value.role is Role.ACTIVATION and plan.places[value.index] is not None
    ]
    sizes_bytes = [one.values[index].size_bytes for index in inner]
    lifetimes = [plan.lifetimes[index] for index in inner]
    for _ in range(6):
        places = list(plan.places)
        for index in inner:
            if draw.random() < 0.3:
                at = 64 * draw.randrange(max(1, plan.feature_map_bytes // 64))
                places[index] = Place(slot, at)
        offsets = [places[index].offset_bytes for index in inner]
        moved = in_lanes(plan, *steps)
        object.__setattr__(moved, "places", tuple(places))
        said = is_right(
            lambda *_, at=offsets: check_lifetimes(lifetimes, sizes_bytes, at), one, moved
        )
        assert is_right(check_order, one, moved) == said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            ([Wait(1), Run(0, 4), Record(0)], [Wait(0), Run(4, 5), Record(1)]),
            "wait for one another",
        ),
        (([Run(0, 4)], []), "expected each of 5 launches once"),
    ],
)
def test_steps_that_make_no_order_are_refused(steps, said):
    lanes = [Lane(LaneKind.LAUNCHES, tuple(each)) for each in steps]
    with pytest.raises(PlanError, match=said):
        value_lifetimes(TOWERS, lanes)


def test_two_towers_share_bytes_within_each_lane():
    lanes = [Lane(LaneKind.LAUNCHES, tuple(each)) for each in JOINED]
    plan = place_values(TOWERS, MACHINE, lifetimes=value_lifetimes(TOWERS, lanes))
    assert plan.feature_map_bytes == plan.lower_bound_bytes == 4 * 64
    check_plan(TOWERS, in_lanes(plan, *JOINED))
