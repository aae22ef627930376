"""Steps of a dispatch without a device: their number, their plans, and the checker of each step."""

import pytest

from offload.errors import PlanError
from offload.native import _planner
from offload.run.device_choice import DeviceChoice, Placement, SegmentCosts

DYNAMIC = Placement.DYNAMIC


def test_a_step_of_the_dispatch_does_not_grow_with_what_is_queued():
    """Where a device stalls, 16 executions that wait are looked at; others begin in their turn."""
    costs = [tuple(1e4 if one == at else None for one in range(3)) for at in range(3)]
    segments = [SegmentCosts(costs[at], (), at) for at in range(3)]
    dispatch = DeviceChoice(segments, DYNAMIC, 0.0).dispatch()
    for _ in range(100):
        dispatch.add([0, 1, 2])
    running, ended = [], []

    def step():
        for kind, number, what, _, _ in dispatch.next([1.0] * 3, 1e4):
            (running if kind == 0 else ended).append((number, what))

    step()
    (stalled,) = [one for one in running if one[1] == 0]
    for one in iter(lambda: next((one for one in running if one != stalled), None), None):
        running.remove(one)
        dispatch.segment_ended(*one)
        step()
        assert one[0] <= 16  # the first has nothing left to begin
    assert one == (16, 2)
    assert running == [stalled]
    while running:
        dispatch.segment_ended(*running.pop(0))
        step()
    assert [number for number, _ in ended] == list(range(100))


def test_changed_paces_lead_to_a_new_plan_at_most_once_in_a_while():
    """5 us for each segment and device, so that short segments do not cost a plan each."""
    segments = [SegmentCosts((1e3, 1e3), tuple(range(at)[-1:]), 0) for at in range(4)]
    dispatch = DeviceChoice(segments, DYNAMIC, 0.0).dispatch()
    dispatch.add([0, 0, 0, 0])
    dispatch.next([1.0, 1.0], 0.0)
    dispatch.next([10.0, 1.0], 100.0)
    assert dispatch.devices(0) == [0, 1, 1, 1]
    dispatch.next([1.0, 10.0], 39_999.0)
    assert dispatch.devices(0) == [0, 1, 1, 1]
    dispatch.next([1.0, 10.0], 100.0 + 40_000.0)
    assert dispatch.devices(0) == [0, 0, 0, 0]


def test_the_checker_refuses_every_wrong_step():
    """Segment 0 reads the input, segment 1 what 0 makes; the caller reads what 1 makes."""
    rules = _planner.DispatchRules(
        inputs=[(0,), (1,)],
        outputs=[(1,), (2,)],
        after=[(), (0,)],
        home=0,
        returned=[2],
        n_memories=2,
        names=[10, 11, 12],
    )

    def right():
        check = _planner.DispatchCheck(rules)
        yield check
        yield check.copied(-1, 0, 1, (0,))
        yield check.arrived(1, (0,))
        yield check.begun(0, 1)
        yield check.ended(0)
        yield check.begun(1, 1)
        yield check.ended(1)
        yield check.copied(1, 1, 0, (2,))
        yield check.arrived(0, (2,))
        yield check.finished()

    assert len(list(right())) == 10

    def after(n):
        steps = right()
        check = next(steps)
        for _ in range(n):
            next(steps)
        return check

    for n, wrong, message in (
        (0, lambda one: one.begun(0, 1), "reads %10, which memory 1 lacks"),
        (0, lambda one: one.ended(0), "without being under way"),
        (0, lambda one: one.arrived(1, (0,)), "without being on its way"),
        (0, lambda one: one.copied(-1, 0, 2, (0,)), "does not exist"),
        (0, lambda one: one.copied(-1, 0, 1, (3,)), "does not exist"),
        (0, lambda one: one.copied(2, 0, 1, (0,)), "does not exist"),
        (0, lambda one: one.begun(2, 0), "does not exist"),
        (0, lambda one: one.begun(0, -1), "does not exist"),
        (1, lambda one: one.begun(0, 1), "lacks"),
        (1, lambda one: one.copied(-1, 0, 1, (0,)), "a second time"),
        (2, lambda one: one.copied(-1, 0, 1, (0,)), "a second time"),
        (2, lambda one: one.begun(1, 1), "before segment 0"),
        (3, lambda one: one.begun(0, 1), "a second time"),
        (3, lambda one: one.begun(1, 1), "before segment 0"),
        (3, lambda one: one.copied(0, 1, 0, (1,)), "before it has ended"),
        (4, lambda one: one.ended(0), "without being under way"),
        (4, lambda one: one.begun(1, 0), "lacks"),
        (4, lambda one: one.copied(0, 0, 1, (1,)), "which lacks it"),
        (4, lambda one: one.finished(), "before its segments"),
        (6, lambda one: one.finished(), "the caller reads %12"),
        (7, lambda one: one.finished(), "the caller reads"),
    ):
        with pytest.raises(PlanError, match=message):
            wrong(after(n))


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": [(3,), (1,)]},
        {"outputs": [(1,), (-1,)]},
        {"after": [(), (2,)]},
        {"after": [()]},
        {"returned": [3]},
        {"home": 2},
    ],
)
def test_rules_with_numbers_of_nothing_are_refused(wrong):
    rules = {
        "inputs": [(0,), (1,)],
        "outputs": [(1,), (2,)],
        "after": [(), (0,)],
        "home": 0,
        "returned": [2],
        "n_memories": 2,
        "names": [0, 1, 2],
    }
    _planner.DispatchRules(**rules)
    with pytest.raises(PlanError):
        _planner.DispatchRules(**rules | wrong)
