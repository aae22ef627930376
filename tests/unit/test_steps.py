"""Steps of launches and copies, told as counters and told from them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import PlanError
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
    """The order that transfers enforce: what each waits for, and by launch how many it needs.

    Launches count on over passes. A transfer waits for what the one before it waits for, also for
    the last one of the pass before.
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


@given(transfers_of())
@settings(deadline=None, max_examples=500)
def test_lanes_enforce_what_transfers_do(case):
    n_launches, transfers = case
    lanes = streaming_lanes(n_launches, transfers)
    assert enforced(n_launches, counted(lanes)) == enforced(n_launches, transfers)
    assert sorted(lanes[1].copies) == [one.piece for one in transfers]
    events = [one.event for lane in lanes for one in lane.steps if isinstance(one, Record)]
    waits = [one.event for lane in lanes for one in lane.steps if isinstance(one, Wait)]
    assert sorted(events) == sorted(waits) == list(range(len(events)))  # none without a use


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
