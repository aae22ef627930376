"""Steps of launches and copies, converted to counters and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.plan.simulate_steps import simulate_steps
from offload.plan.simulate_streaming import simulate_transfers
from offload.plan.steps import (
    Copy,
    Lane,
    LaneKind,
    Record,
    Run,
    Transfer,
    Wait,
    counted,
    launch_lane,
    prologue,
    streaming_lanes,
)
from offload.plan.topology import Link


@st.composite
def transfers_of(draw):
    """Some launches, and transfers for them in the order in which they are needed."""
    n_launches = draw(st.integers(1, 8))
    firsts = sorted(draw(st.lists(st.integers(0, n_launches - 1), min_size=1, max_size=8)))
    steps = [draw(st.integers(-n_launches, first - 1)) for first in firsts]
    return n_launches, [
        Transfer(piece, first, step % n_launches, step // n_launches)
        for piece, (first, step) in enumerate(zip(firsts, steps, strict=True))
    ]


def enforced(n_launches, transfers):
    """The order that transfers enforce: the wait of each, and the number that each launch needs.

    Launches are counted across passes. A transfer inherits the wait of the preceding one, also from
    the last one of the preceding pass.
    """
    steps = [one.after_pass * n_launches + one.after_launch for one in transfers]
    latest, waits = max(steps) - n_launches, []
    for step in steps:
        latest = max(latest, step)
        waits.append(latest)
    needs = [
        max((at + 1 for at, one in enumerate(transfers) if one.first_launch <= launch), default=0)
        for launch in range(n_launches)
    ]
    return [one.piece for one in transfers], waits, needs


@pytest.mark.slow
@given(transfers_of())
@settings(deadline=None, max_examples=500)
def test_lanes_enforce_what_transfers_do(case):
    n_launches, transfers = case
    lanes = streaming_lanes(n_launches, transfers)
    assert enforced(n_launches, counted(lanes)) == enforced(n_launches, transfers)
    assert sorted(one.piece for one in lanes[1].copies) == [one.piece for one in transfers]
    events = [one.event for lane in lanes for one in lane.steps if isinstance(one, Record)]
    waits = [one.event for lane in lanes for one in lane.steps if isinstance(one, Wait)]
    assert sorted(events) == sorted(waits) == list(range(len(events)))  # no unused event


@given(transfers_of(), st.data())
@settings(deadline=None, max_examples=300)
def test_simulated_steps_take_what_the_planners_recurrence_says(case, data):
    n_launches, transfers = case
    times = st.floats(0, 1e6)
    launch_ns = data.draw(st.lists(times, min_size=n_launches, max_size=n_launches))
    copy_ns = data.draw(st.lists(times, min_size=len(transfers), max_size=len(transfers)))
    link = Link(1e9, 0.0)  # a byte takes a nanosecond
    sizes_bytes = [round(one) for one in copy_ns]
    expected = simulate_transfers(launch_ns, transfers, sizes_bytes, link)
    lanes = streaming_lanes(n_launches, transfers)
    found = simulate_steps(lanes, launch_ns, [float(one) for one in sizes_bytes])
    near = lambda values: pytest.approx(values, rel=1e-6, abs=1e-3)  # noqa: E731
    assert found.period_ns == near(expected.period_ns)
    assert found.launch_begin_ns == near(expected.launch_begin_ns)
    assert found.launch_end_ns == near(expected.launch_end_ns)
    assert found.copy_end_ns == near(expected.copy_end_ns)


def test_launches_on_two_lanes():
    """A diamond: launch 0, then 1 beside 2 and 3, then 4 after both."""
    lanes = (
        Lane(
            LaneKind.LAUNCHES,
            (Run(0, 1), Record(0), Run(1, 2), Wait(1), Run(4, 5), Record(2)),
        ),
        Lane(LaneKind.LAUNCHES, (Wait(2, age=1), Wait(0), Run(2, 4), Record(1))),
    )
    found = simulate_steps(lanes, (10.0, 50.0, 20.0, 5.0, 7.0), ())
    assert found.launch_begin_ns == (0.0, 10.0, 10.0, 30.0, 60.0)
    assert found.launch_end_ns == (10.0, 60.0, 30.0, 35.0, 67.0)
    assert found.period_ns == 67.0
    slow = simulate_steps(lanes, (10.0, 5.0, 20.0, 5.0, 7.0), ())
    assert slow.launch_begin_ns == (0.0, 10.0, 10.0, 30.0, 35.0)


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ([[Run(0, 3)]], "there are 2 launches"),
        ([[Run(0, 2), Run(1, 2)]], "run twice"),
        ([[Copy(1)]], "there are 1 pieces"),
        ([[Wait(0)]], "nothing records"),
        ([[Record(0), Record(0)]], "recorded twice"),
        ([[Record(0), Wait(0, age=2)]], "this execution or the one before"),
        ([[Wait(0), Record(1)], [Wait(1), Record(0)]], "lanes wait for one another"),
    ],
)
def test_steps_that_cannot_be_carried_out(lanes, message):
    with pytest.raises(PlanError, match=message):
        simulate_steps([Lane(LaneKind.LAUNCHES, tuple(one)) for one in lanes], (1.0, 1.0), (1.0,))


def test_a_ring_of_two_places():
    transfers = [Transfer(0, 0, 2, -1), Transfer(1, 1, 3, -1), Transfer(2, 2, 0, 0)]
    launches, copies = streaming_lanes(4, transfers)
    assert launches.steps == (
        Wait(3, age=1), Run(0, 1), Record(0), Wait(4, age=1), Run(1, 2),
        Wait(5), Run(2, 3), Record(1), Run(3, 4), Record(2),
    )  # fmt: skip
    assert copies.steps == (
        Wait(0), Copy(2), Record(5), Wait(1), Copy(0, ahead=1), Record(3), Wait(2),
        Copy(1, ahead=1), Record(4),
    )  # fmt: skip
    assert prologue(copies) == (
        Copy(0, ahead=1), Record(3), Copy(1, ahead=1), Record(4),
    )  # fmt: skip
    assert prologue(launches) == ()


def test_without_transfers_there_is_one_lane():
    assert streaming_lanes(3, ()) == (Lane(LaneKind.LAUNCHES, (Run(0, 3),)),)
    assert counted((launch_lane(3),)) == ()
    assert launch_lane(0).steps == ()


def test_copies_that_nothing_holds_back_are_not_counted():
    lanes = (launch_lane(1), Lane(LaneKind.COPIES, (Copy(0), Record(0))))
    with pytest.raises(PlanError, match="copies that wait for launches"):
        counted(lanes)
