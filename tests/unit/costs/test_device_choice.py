"""Devices chosen for segments by measured executions, on a virtual clock."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.native import _native
from offload.run.device_choice import DeviceChoice, Placement, SegmentCosts

US = 1e3


def chain(costs, planned):
    return [
        SegmentCosts(tuple(row), (at - 1,) if at else (), device)
        for at, (row, device) in enumerate(zip(costs, planned, strict=True))
    ]


def executed(choice, segments, slow, n_executions):
    """Execute on devices that take `slow` times the expected duration; return the last devices."""
    for _ in range(n_executions):
        devices = choice.choose()
        choice.ended(
            devices,
            [one.costs_ns[at] * slow[at] for one, at in zip(segments, devices, strict=True)],
        )
    return devices


def value_at(segments, devices, slow, hand_over_ns):
    """The duration of an execution on these devices at these paces."""
    knowing = DeviceChoice(segments, Placement.STATIC, hand_over_ns)
    knowing.native_paces = _native.DevicePaces(list(slow))
    return knowing.value(devices)


def best_of_all(segments, slow, hand_over_ns):
    able = [[at for at, ns in enumerate(one.costs_ns) if ns is not None] for one in segments]
    return min(value_at(segments, one, slow, hand_over_ns) for one in itertools.product(*able))


def test_a_static_plan_stays():
    segments = chain([[10 * US, 20 * US]] * 4, [0] * 4)
    choice = DeviceChoice(segments, Placement.STATIC, US)
    assert executed(choice, segments, [10.0, 1.0], 20) == (0, 0, 0, 0)
    assert choice.n_moved == 0


@pytest.mark.parametrize("placement", [Placement.HYBRID, Placement.DYNAMIC])
def test_what_runs_late_is_moved_and_comes_back(placement):
    segments = chain([[100 * US, 150 * US]] * 4, [0] * 4)
    choice = DeviceChoice(segments, placement, US)
    assert executed(choice, segments, [1.0, 1.0], 5) == (0, 0, 0, 0)
    assert executed(choice, segments, [3.0, 1.0], 10) == (1, 1, 1, 1)
    # The device is as fast as before, which stays unknown until its pace is forgotten.
    assert executed(choice, segments, [1.0, 1.0], 200) == (0, 0, 0, 0)


def test_small_changes_move_nothing():
    segments = chain([[100 * US, 101 * US]] * 4, [0] * 4)
    choice = DeviceChoice(segments, Placement.HYBRID, US)
    assert executed(choice, segments, [1.03, 1.0], 50) == (0, 0, 0, 0)
    assert choice.n_moved == 0


def test_one_outlier_moves_nothing():
    """A thread was preempted for long; what lasts is followed all the same."""
    segments = chain([[100 * US, 160 * US]] * 4, [0] * 4)
    choice = DeviceChoice(segments, Placement.HYBRID, US)
    for _ in range(5):
        assert executed(choice, segments, [1.0, 1.0], 5) == (0, 0, 0, 0)
        assert executed(choice, segments, [1000.0, 1.0], 1) == (0, 0, 0, 0)
    assert choice.n_moved == 0
    assert max(choice.paces) <= 2.0
    assert executed(choice, segments, [1000.0, 1.0], 5) == (1, 1, 1, 1)


def test_throughput_divides_the_work():
    segments = chain([[100 * US, 100 * US]] * 6, [0, 0, 0, 1, 1, 1])
    choice = DeviceChoice(segments, Placement.HYBRID, US, is_throughput=True)
    assert executed(choice, segments, [1.0, 1.0], 3) == (0, 0, 0, 1, 1, 1)
    devices = executed(choice, segments, [3.0, 1.0], 10)
    assert devices.count(0) in (1, 2)


def test_a_segment_stays_where_it_is_loaded():
    segments = chain([[100 * US, 50 * US], [100 * US, None], [100 * US, 50 * US]], [0, 0, 0])
    choice = DeviceChoice(segments, Placement.DYNAMIC, US)
    assert executed(choice, segments, [5.0, 1.0], 10) == (1, 0, 1)


graphs = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.tuples(*[st.integers(20, 400)] * 2), min_size=n, max_size=n),
        st.lists(st.lists(st.integers(0, 5), max_size=2), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
    )
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(graph=graphs, slowed=st.integers(0, 1))
def test_a_device_slowed_down_threefold(graph, slowed):
    """At most 1.15 times a plan with full knowledge, and seldom that much."""
    costs, after, _ = graph
    segments = [
        SegmentCosts(
            tuple(ns * US for ns in row), tuple({one % at for one in before} if at else ()), 0
        )
        for at, (row, before) in enumerate(zip(costs, after, strict=True))
    ]
    able = list(itertools.product(range(2), repeat=len(segments)))
    planned = min(able, key=lambda one: value_at(segments, one, [1.0, 1.0], 10 * US))
    segments = [
        SegmentCosts(one.costs_ns, one.after, device)
        for one, device in zip(segments, planned, strict=True)
    ]
    slow = [3.0 if one == slowed else 1.0 for one in range(2)]
    choice = DeviceChoice(segments, Placement.HYBRID, 10 * US)
    devices = executed(choice, segments, slow, 12)
    found = value_at(segments, devices, slow, 10 * US)
    assert found <= 1.15 * best_of_all(segments, slow, 10 * US)
