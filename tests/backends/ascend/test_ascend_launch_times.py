"""Durations of launches on the simulated Ascend device: events on a blocked stream."""

from __future__ import annotations

import gc
import time

import pytest
from ascend_client import MEMORY_ALLOCATION, PARAM_INVALID
from ascend_residents import COUNT, NUMBERS, Chain, add_one, live, plus, read
from device_streaming import AscendDevice, floor_on

import offload
from offload.backends.ascend import AscendBackend
from offload.backends.ascend.launch_times import timed_launches
from offload.load.place import place
from offload.native import _native

FEWEST_COPIES, MOST_COPIES = 16, 256  # that hold a group back
GROUP = 64
SLEPT_NS = 20_000_000


@pytest.fixture
def timer(ascend):
    return _native.AscendLaunchTimer(0)


def test_kernels_are_launched_one_by_one(ascend, timer):
    chain = Chain(ascend)
    _, y = chain.bind_first()
    before, copies = live(ascend), ascend.calls("aclrtMemcpyAsync")
    executions = ascend.calls("aclmdlRIExecuteAsync")
    for round_ in range(2):
        times = chain.resident.time_launches(timer)
        assert len(times) == 3
        assert all(one.time_ns > 0 and one.host_was_ahead for one in times)
        assert read(y) == plus(3)
        if not round_:
            n_refreshes = 1  # the table
            assert ascend.calls("aclrtMemcpyAsync") - copies == FEWEST_COPIES + n_refreshes
            after = live(ascend)
    assert ascend.calls("aclmdlRIExecuteAsync") == executions
    assert live(ascend) == after
    assert after["event"] == before["event"] + 2 * 3
    del timer
    gc.collect()


def test_moved_slots_are_heeded(ascend, timer):
    chain = Chain(ascend)
    chain.bind_first()
    chain.resident.time_launches(timer)
    moved = chain.allocate()
    chain.bind(output=moved)
    chain.resident.time_launches(timer)
    assert read(moved) == plus(3)


def test_the_time_of_a_launch_is_its_own(ascend, timer):
    calls = []

    def second_sleeps(block: bytes, n_blocks: int) -> None:
        calls.append(None)
        if len(calls) == 2:
            time.sleep(SLEPT_NS / 1e9)
        add_one(block, n_blocks)

    chain = Chain(ascend, function=second_sleeps)
    chain.bind_first()
    times = chain.resident.time_launches(timer)
    assert times[1].time_ns >= SLEPT_NS * 0.99  # as a float of milliseconds
    assert len(calls) == 3


def test_launches_are_held_back_in_groups(ascend, timer):
    n_launches = 2 * GROUP + 2
    chain = Chain(ascend, n_launches)
    y = chain.allocate()
    chain.bind(
        input=chain.allocate(NUMBERS),
        output=y,
        feature_map=chain.allocate([0] * COUNT * n_launches),
    )
    copies, events = ascend.calls("aclrtMemcpyAsync"), ascend.live("event")
    times = chain.resident.time_launches(timer)
    assert len(times) == n_launches
    assert all(one.host_was_ahead for one in times)
    assert read(y) == plus(n_launches)
    assert ascend.calls("aclrtMemcpyAsync") - copies == 3 * FEWEST_COPIES + 1
    assert ascend.live("event") == events + 2 * GROUP


def test_a_host_that_falls_behind_is_told_and_given_more_time(ascend, timer):
    """A device that runs at once begins before the host has enqueued the group."""
    ascend.set_eager(True)
    chain = Chain(ascend)
    chain.bind_first()
    chain.resident.time_launches(timer)
    chain.bind(output=chain.allocate())
    n_copies, expected = [], []
    for round_ in range(1, 6):
        before = ascend.calls("aclrtMemcpyAsync")
        times = chain.resident.time_launches(timer)
        n_copies.append(ascend.calls("aclrtMemcpyAsync") - before)
        expected.append(min(FEWEST_COPIES << round_, MOST_COPIES) + (round_ == 1))
        assert not any(one.host_was_ahead for one in times)
    assert n_copies == expected
    ascend.set_eager(False)
    assert all(one.host_was_ahead for one in chain.resident.time_launches(timer))


FUNCTIONS = [
    ("aclrtCreateStreamWithConfig", 1),
    ("aclrtMemcpyAsync", 1),
    ("aclrtMemcpyAsync", 5),
    ("aclrtCreateEventExWithFlag", 3),
    ("aclrtRecordEvent", 1),
    ("aclrtRecordEvent", 4),
    ("aclrtLaunchKernel", 2),
    ("aclrtQueryEventStatus", 1),
    ("aclrtSynchronizeEvent", 1),
    ("aclrtEventElapsedTime", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "nth"), FUNCTIONS)
def test_a_failed_round_leaves_nothing_and_can_be_tried_again(function, nth, ascend):
    chain = Chain(ascend)
    _, y = chain.bind_first()
    before = live(ascend)
    timer = _native.AscendLaunchTimer(0)
    ascend.fail(function, 507000, nth)
    with pytest.raises(offload.ExecutionError, match="ACL_ERROR_RT_INTERNAL_ERROR"):
        chain.resident.time_launches(timer)
    ascend.forget_calls()
    copies = ascend.calls("aclrtMemcpyAsync")
    assert len(chain.resident.time_launches(timer)) == 3
    assert ascend.calls("aclrtMemcpyAsync") - copies in (FEWEST_COPIES, FEWEST_COPIES + 1)
    assert read(y) == plus(3)
    del timer
    gc.collect()
    assert live(ascend) == before


def test_a_kernel_that_faults_fails_the_round(ascend, timer):
    def fault(block: bytes, n_blocks: int) -> None:
        raise ValueError("a fault")

    chain = Chain(ascend, function=fault)
    chain.bind_first()
    with pytest.raises(offload.ExecutionError, match="ACL_ERROR_RT_"):
        chain.resident.time_launches(timer)
    ascend.errors.clear()


@pytest.mark.parametrize("code", [PARAM_INVALID, 207000])
def test_a_runtime_without_events_that_tell_times(code, ascend):
    before = live(ascend)
    ascend.fail("aclrtCreateEventExWithFlag", code)
    with pytest.raises(offload.BackendUnavailable, match="ACL_EVENT_TIME_LINE"):
        _native.AscendLaunchTimer(0)
    assert live(ascend) == before


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("aclrtMalloc", offload.OutOfMemory),
        ("aclrtMallocHost", offload.ExecutionError),
    ],
)
def test_memory_that_a_timer_finds_none_of(function, kind, ascend):
    before = live(ascend)
    ascend.fail(function, MEMORY_ALLOCATION)
    with pytest.raises(offload.ExecutionError) as raised:
        _native.AscendLaunchTimer(0)
    assert type(raised.value) is kind
    assert live(ascend) == before


def test_a_runtime_without_them_leaves_estimates(ascend, monkeypatch, deep):
    npu = AscendDevice(ascend, monkeypatch)
    monkeypatch.setattr(type(npu.backend), "timing", AscendBackend.timing)
    budget = floor_on(deep, npu.backend)
    ascend.fail("aclrtCreateEventExWithFlag", PARAM_INVALID)
    with deep.load(npu.backend.name, weights_budget=budget) as run:
        assert "estimates from their bytes: launches could not be timed" in run.streaming.explain()


def test_streamed_weights_are_not_timed(ascend, monkeypatch, deep, timer):
    npu = AscendDevice(ascend, monkeypatch)
    budget = floor_on(deep, npu.backend)
    with (
        deep.load(npu.backend.name, weights_budget=budget, verify=False) as run,
        pytest.raises(offload.ExecutionError, match="no weight is streamed"),
    ):
        run._loaded.resident.time_launches(timer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", ["aclrtRecordEvent", "aclrtLaunchKernel", "aclrtMalloc", "aclrtMemcpy"]
)
def test_timing_that_fails_leaves_nothing(function, ascend, monkeypatch, deep):
    npu = AscendDevice(ascend, monkeypatch)
    prepared = npu.backend.prepare(deep.bound)
    plan = place(prepared, npu.backend)
    gc.collect()
    held = npu.held()
    ascend.fail(function, 507000)
    with pytest.raises(offload.ExecutionError, match="ACL_ERROR_RT_INTERNAL_ERROR"):
        AscendBackend.timing.fget(npu.backend).time_launches(prepared, plan)
    gc.collect()
    assert npu.held() == held


def test_what_is_told_of_rounds():
    class Time:
        def __init__(self, time_ns: float, host_was_ahead: bool = True) -> None:
            self.time_ns, self.host_was_ahead = time_ns, host_was_ahead

    first = [Time(900.0), Time(900.0)]
    timed = timed_launches([first, *([Time(one), Time(10 * one)] for one in (3.0, 1.0, 2.0))])
    assert timed.times_ns == (2.0, 20.0)
    assert timed.how.startswith("medians of 3 rounds")
    assert "waited" not in timed.how
    behind = [Time(50.0, False), Time(70.0, False)]
    timed = timed_launches([first, behind, [Time(1.0), Time(90.0, False)], behind])
    assert timed.times_ns == (1.0, 70.0)
    assert "1 of 2 launches include waits of the device for the host" in timed.how
