import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming_cases import (
    ALIGNMENT,
    GRANULE,
    LINK,
    Interpreter,
    Stuck,
    WrongBytes,
    chain,
    demands,
)

from offload.errors import PlanError
from offload.plan import check_streaming, stream_weights
from offload.plan.steps import (
    Copy,
    Lane,
    LaneKind,
    Record,
    Run,
    Transfer,
    Wait,
    launch_lane,
    streaming_lanes,
)
from offload.plan.streaming import Piece, Streaming, StreamingFloor, WeightDemand, WeightUse
from offload.plan.topology import MemoryLayout

FLOOR = StreamingFloor(0, 0, 0, 0, "", 0.0)


def streaming(pieces, lanes, memory_bytes):
    return Streaming(
        budget_bytes=memory_bytes,
        memory_bytes=memory_bytes,
        granule_bytes=GRANULE,
        pieces=tuple(pieces),
        lanes=tuple(lanes),
        period_ns=0.0,
        compute_ns=0.0,
        roofline_ns=0.0,
        floor=FLOOR,
        link=LINK,
    )


def in_slots(slots, after, size_bytes=8192):
    """A chain in which weight i lies in slots[i] and its transfer waits for after[i]."""
    n_launches = len(slots)
    pieces = [
        Piece(index, 0, size_bytes, slot * size_bytes, True) for index, slot in enumerate(slots)
    ]
    transfers = [
        Transfer(index, index, step % n_launches, step // n_launches)
        for index, step in enumerate(after)
    ]
    lanes = streaming_lanes(n_launches, transfers)
    return chain([size_bytes] * n_launches), streaming(pieces, lanes, (max(slots) + 1) * size_bytes)


def outcomes(demand, plan, n_timings=30):
    """The outcomes of executions at this many timings."""
    found = set()
    for seed in range(n_timings):
        try:
            Interpreter(demand, plan, seed).run(n_passes=4)
            found.add("right")
        except WrongBytes:
            found.add("wrong")
        except Stuck:
            found.add("stuck")
    return found


def replaced(plan, index, **changes):
    """With one transfer replaced."""
    transfers = list(plan.transfers)
    transfers[index] = dataclasses.replace(transfers[index], **changes)
    n_launches = max(one.last for one in plan.lanes[0].steps if isinstance(one, Run))
    lanes = streaming_lanes(n_launches, transfers)
    return dataclasses.replace(plan, lanes=lanes)


def with_steps(plan, lane, steps):
    """With other steps in a lane."""
    lanes = list(plan.lanes)
    lanes[lane] = dataclasses.replace(lanes[lane], steps=tuple(steps))
    return dataclasses.replace(plan, lanes=tuple(lanes))


def without(plan, lane, kind, which=0):
    """Without one of the steps of a kind."""
    steps = list(plan.lanes[lane].steps)
    steps.remove([one for one in steps if isinstance(one, kind)][which])
    return with_steps(plan, lane, steps)


def lanes_of(launches, copies):
    return (
        Lane(LaneKind.LAUNCHES, tuple(launches)),
        Lane(LaneKind.COPIES, tuple(copies)),
    )


def moved(plan, index, **changes):
    pieces = list(plan.pieces)
    pieces[index] = dataclasses.replace(pieces[index], **changes)
    return dataclasses.replace(plan, pieces=tuple(pieces))


# ---- each class of race -------------------------------------------------------------------------


def test_three_units_in_two_slots():
    """As in vLLM #54975: the wait is right for a continuing ring, not for fixed positions."""
    right = in_slots([0, 1, 0], [-1, -2, 0])
    check_streaming(*right)
    assert outcomes(*right) == {"right"}
    demand, drifting = in_slots([0, 1, 0], [-2, -1, 0])  # each waits for the unit two before
    with pytest.raises(PlanError, match=r"(?=.*the copy of weight 0)(?=.*launch 2)"):
        check_streaming(demand, drifting)
    assert "wrong" in outcomes(demand, drifting)


def test_a_write_before_the_last_reader():
    demand, plan = in_slots([0, 0, 1, 1], [-1, 0, -1, 2])
    check_streaming(demand, plan)
    early = without(plan, 1, Wait)  # of the launch whose weight lies there
    with pytest.raises(PlanError, match=r"(?=.*the copy of weight 1)(?=.*launch 0)"):
        check_streaming(demand, early)
    assert "wrong" in outcomes(demand, early)


def test_a_write_over_the_pass_before():
    demand, plan = in_slots([0, 1, 2], [-3, -2, -1])
    check_streaming(demand, plan)
    early = replaced(plan, 2, after_launch=1)
    with pytest.raises(PlanError, match=r"(?=.*the copy of weight 2)(?=.*launch 2)"):
        check_streaming(demand, early)
    assert "wrong" in outcomes(demand, early)


def test_a_read_before_arrival():
    demand, plan = in_slots([0, 1, 2], [-3, -2, -1])
    late = without(plan, 0, Wait, which=1)
    with pytest.raises(PlanError, match=r"(?=.*launch 1)(?=.*the copy of weight 1)"):
        check_streaming(demand, late)
    assert "wrong" in outcomes(demand, late)


def test_what_the_execution_before_should_have_streamed():
    demand, plan = in_slots([0, 1, 2], [-3, -2, -1])
    steps = [
        dataclasses.replace(one, age=0) if isinstance(one, Wait) else one
        for one in plan.lanes[0].steps
    ]
    stuck = with_steps(plan, 0, steps)
    with pytest.raises(PlanError, match="lanes wait for one another"):
        check_streaming(demand, stuck)
    assert outcomes(demand, stuck) == {"stuck"}
    late = with_steps(plan, 1, [dataclasses.replace(one, ahead=0) if isinstance(one, Copy) else one
                                for one in plan.lanes[1].steps])  # fmt: skip
    with pytest.raises(PlanError, match="launch 0 would not find what it reads"):
        check_streaming(demand, late)
    assert "wrong" in outcomes(demand, late)


def test_what_waits_for_itself():
    demand, plan = in_slots([0, 1, 2], [-3, 0, 1])
    check_streaming(demand, plan)
    stuck = replaced(plan, 1, after_launch=1)
    with pytest.raises(PlanError, match="lanes wait for one another: the lane of launches at"):
        check_streaming(demand, stuck)
    assert outcomes(demand, stuck) == {"stuck"}


def test_an_earlier_transfer_may_wait_on_behalf_of_a_later_one():
    demand, plan = in_slots([0, 1, 0], [-1, -3, 0])
    check_streaming(demand, plan)  # transfer 1 begins after transfer 0, which has waited
    assert outcomes(demand, plan) == {"right"}


def test_a_piece_may_be_copied_twice_in_an_execution():
    """As a block that distant launches share: meanwhile its place serves another one."""
    shared = WeightUse(0, 8192, (0, 2), "shared")
    demand = WeightDemand((1.0,) * 3, (shared, WeightUse(1, 8192, (1,), "between")))
    pieces = [Piece(0, 0, 8192, 0, True), Piece(1, 0, 8192, 0, True)]
    launches = [
        Wait(3, age=1),
        Run(0, 1), Record(0), Wait(2), Run(1, 2), Record(1), Wait(3), Run(2, 3),
    ]  # fmt: skip
    copies = [Wait(0), Copy(1), Record(2), Wait(1), Copy(0), Record(3)]
    plan = streaming(pieces, lanes_of(launches, copies), 8192)
    with pytest.raises(PlanError, match="launch 0 would not find what it reads"):
        check_streaming(demand, plan)
    assert "wrong" in outcomes(demand, plan)
    copies[4] = Copy(0, ahead=1)
    check_streaming(demand, with_steps(plan, 1, copies))
    assert outcomes(demand, with_steps(plan, 1, copies)) == {"right"}
    late = with_steps(plan, 1, [*copies[:3], *copies[4:]])  # does not wait for launch 1
    with pytest.raises(PlanError, match=r"(?=.*the copy of shared)(?=.*launch 1)"):
        check_streaming(demand, late)
    assert "wrong" in outcomes(demand, late)


def test_steps_that_are_no_order():
    demand, plan = in_slots([0, 1, 2], [-3, 0, 1])
    launches, copies = (lane.steps for lane in plan.lanes)
    wrong = {
        "recorded twice": with_steps(plan, 1, [*copies, copies[-1]]),
        "each of 3 launches once": with_steps(plan, 0, [*launches, Run(4, 5)]),
        "each of 3 launches": with_steps(plan, 0, launches[:-1]),
        "in the wrong order": with_steps(plan, 0, [Run(1, 2), Run(0, 1), Run(2, 3)]),
        "an event of this execution or the one before": with_steps(
            plan, 1, [Wait(copies[0].event, age=2), *copies]
        ),
        "got Wait": with_steps(plan, 1, [Wait(99), *copies]),
        "piece 7 is copied": with_steps(plan, 1, [*copies, Copy(7)]),
    }
    for message, mutated in wrong.items():
        with pytest.raises(PlanError, match=message):
            check_streaming(demand, mutated)


def test_a_ring_over_a_resident_weight():
    demand = chain([8192, 8192])
    plan = streaming(
        [Piece(0, 0, 8192, 0, False), Piece(1, 0, 8192, 4096, True)],
        streaming_lanes(2, [Transfer(1, 1, 1, -1)]),
        1 << 20,
    )
    with pytest.raises(PlanError, match=r"weight 1 at byte 4096 .* overlaps one of weight 0"):
        check_streaming(demand, plan)
    assert "wrong" in outcomes(demand, plan)


def test_a_resident_weight_inside_a_large_streamed_one():
    demand = chain([4096, 65536, 4096])
    plan = streaming(
        [
            Piece(0, 0, 4096, 0, False),
            Piece(1, 0, 65536, 4096, True),
            Piece(2, 0, 4096, 8192, False),
        ],
        streaming_lanes(3, [Transfer(1, 1, 1, -1)]),
        1 << 20,
    )
    with pytest.raises(PlanError, match="weight 2 at byte 8192"):
        check_streaming(demand, plan)


# ---- pieces and budget --------------------------------------------------------------------------


def test_pieces_and_budget():
    demand = chain([3 * GRANULE, 8192])
    right = streaming(
        [
            Piece(0, 0, GRANULE, 0, False),
            Piece(0, GRANULE, 2 * GRANULE, GRANULE, True),
            Piece(1, 0, 8192, 3 * GRANULE, False),
        ],
        streaming_lanes(2, [Transfer(1, 0, 0, -1)]),
        5 * GRANULE,
    )
    check_streaming(demand, right)
    wrong = {
        "of a budget of": dataclasses.replace(right, budget_bytes=5 * GRANULE - 1),
        "outside of the memory": dataclasses.replace(right, memory_bytes=4 * GRANULE),
        "lies at 4352": moved(right, 1, memory_offset_bytes=GRANULE + 256),
        "expected a piece from byte 4096": moved(right, 1, offset_bytes=2 * GRANULE),
        "expected pieces of 12288 bytes, got 8192": moved(right, 1, size_bytes=GRANULE),
        "got 0 bytes": moved(right, 2, size_bytes=0),
        "pieces begin at multiples": moved(
            moved(right, 0, size_bytes=GRANULE - 256),
            1,
            offset_bytes=GRANULE - 256,
            size_bytes=2 * GRANULE + 256,
        ),
        "have pieces but are not weights": moved(right, 2, value=7),
        "piece 0 of weight 0 is copied, but is not a streamed": replaced(right, 0, piece=0),
        "nothing copies weight 0": dataclasses.replace(right, lanes=(launch_lane(2),)),
        "are not adjacent": dataclasses.replace(
            right, pieces=(right.pieces[0], right.pieces[2], right.pieces[1])
        ),
    }
    for message, plan in wrong.items():
        with pytest.raises(PlanError, match=message):
            check_streaming(demand, plan)


def test_a_weight_without_bytes_has_one_piece_without_bytes():
    demand = chain([0, 8192])
    pieces = [Piece(0, 0, 0, 0, False), Piece(1, 0, 8192, 0, True)]
    right = streaming(pieces, streaming_lanes(2, [Transfer(1, 1, 1, -1)]), 8192)
    check_streaming(demand, right)
    twice = dataclasses.replace(right, pieces=(pieces[0], *right.pieces))
    with pytest.raises(PlanError, match="expected a piece from byte 0, got 0 bytes from 0"):
        check_streaming(demand, twice)


def test_a_weight_that_must_stay():
    demand, plan = in_slots([0, 1], [-2, -1])
    first = dataclasses.replace(demand.weights[0], stays=True)
    demand = dataclasses.replace(demand, weights=(first, demand.weights[1]))
    with pytest.raises(PlanError, match="weight 0 must stay resident"):
        check_streaming(demand, plan)


# ---- mutations ----------------------------------------------------------------------------------


@st.composite
def other_steps(draw, plan, lane):
    """The steps of a lane, with one left out, moved or replaced."""
    steps = list(plan.lanes[lane].steps)
    index = draw(st.integers(0, len(steps) - 1))
    match draw(st.sampled_from(["left out", "moved", "twice", "changed"])):
        case "left out":
            del steps[index]
        case "moved":
            steps.insert(draw(st.integers(0, len(steps) - 1)), steps.pop(index))
        case "twice":
            steps.insert(draw(st.integers(0, len(steps))), steps[index])
        case "changed":
            field = draw(st.sampled_from([one.name for one in dataclasses.fields(steps[index])]))
            value = draw(st.integers(0, 1 if field in ("age", "ahead") else 2 * len(steps)))
            steps[index] = dataclasses.replace(steps[index], **{field: value})
    return steps


@st.composite
def mutations(draw):
    """A plan of the planner, and that plan with one step or one field of a piece changed."""
    demand = draw(demands(most_weights=8))
    roomy = _plan(demand, 1 << 40)
    floor, full = roomy.floor.required_bytes, roomy.memory_bytes
    plan = _plan(demand, draw(st.integers(floor, full)))
    if plan.transfers and draw(st.booleans()):
        lane = draw(st.integers(0, 1))
        return demand, plan, with_steps(plan, lane, draw(other_steps(plan, lane)))
    index = draw(st.integers(0, len(plan.pieces) - 1))
    field = draw(st.sampled_from(["offset_bytes", "size_bytes", "memory_offset_bytes", "streamed"]))
    value = ALIGNMENT * draw(st.integers(0, plan.memory_bytes // ALIGNMENT))
    return (
        demand,
        plan,
        moved(plan, index, **{field: value if field != "streamed" else bool(value)}),
    )


def _plan(demand, budget_bytes):
    return stream_weights(
        demand, MemoryLayout(ALIGNMENT, GRANULE), LINK, budget_bytes, mapped_link=LINK
    )


@pytest.mark.slow
@given(mutations())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_mutations_are_rejected_or_harmless(case):
    demand, plan, mutated = case
    check_streaming(demand, plan)
    if not _is_rejected(demand, mutated):
        assert outcomes(demand, mutated) == {"right"}


def test_waits_are_necessary():
    """In a tight plan every earlier wait is rejected, and fails at some timing."""
    demand = chain([8192] * 9, launch_ns=4_000.0)
    plan = _plan(demand, 4 * 8192)
    n_rejected = 0
    for index, one in enumerate(plan.transfers):
        step = one.after_pass * 9 + one.after_launch - 1
        if step < -9:
            continue
        mutated = replaced(plan, index, after_launch=step % 9, after_pass=step // 9)
        if _is_rejected(demand, mutated):
            assert "wrong" in outcomes(demand, mutated, n_timings=60)
            n_rejected += 1
        else:
            assert outcomes(demand, mutated) == {"right"}
    assert n_rejected >= len(plan.transfers) // 2


def _is_rejected(demand, plan) -> bool:
    try:
        check_streaming(demand, plan)
    except PlanError:
        return True
    return False
