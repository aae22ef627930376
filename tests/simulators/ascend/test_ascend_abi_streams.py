"""Streams and events of the simulated Ascend runtime."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest


def query(ascend, function, handle):
    status = ctypes.c_int(-1)
    ascend.call(function, handle, ctypes.byref(status))
    return status.value


def test_work_is_late_and_in_order(ascend, npu):
    stream = npu.stream()
    npu.note(stream, 1)
    ascend.call(
        "aclrtLaunchHostFunc", stream, ascend.host_function(lambda: npu.order.append("host")), 0
    )
    npu.note(stream, 2)
    assert npu.order == []
    npu.synchronize(stream)
    assert npu.order == ["note 1 of 1", "host", "note 2 of 1"]


def test_streams_are_ordered_by_events_only(npu):
    first, second = npu.stream(), npu.stream()
    npu.note(first, 1)
    npu.note(second, 2)
    npu.synchronize(second)
    assert npu.order == ["note 2 of 1"]
    event = npu.event()
    npu.record(event, first)
    npu.wait(second, event)
    npu.note(second, 3)
    npu.synchronize(second)
    assert npu.order == ["note 2 of 1", "note 1 of 1", "note 3 of 1"]


def test_the_default_stream_is_a_stream_like_others(ascend, npu):
    stream, default = npu.stream(), ascend.make("aclrtCtxGetCurrentDefaultStream")
    npu.note(stream, 1)
    npu.note(0, 2)
    npu.note(default, 3)
    npu.synchronize(0)
    assert npu.order == ["note 2 of 1", "note 3 of 1"]
    assert ascend.code("aclrtDestroyStream", default) == acl.PARAM_INVALID


def test_a_wait_is_for_the_record_that_was_latest_then(npu):
    first, second, event = npu.stream(), npu.stream(), npu.event()
    npu.note(first, 1)
    npu.record(event, first)
    npu.wait(second, event)
    npu.note(first, 2)
    npu.record(event, first)
    npu.note(second, 3)
    npu.synchronize(second)
    assert npu.order == ["note 1 of 1", "note 3 of 1"]


def test_asking_finds_work_undone_the_first_time(ascend, npu):
    stream, event = npu.stream(), npu.event()
    assert query(ascend, "aclrtQueryEventStatus", event) == 1  # never recorded: complete
    assert query(ascend, "aclrtQueryEvent", event) == 0
    npu.note(stream, 1)
    npu.record(event, stream)
    assert query(ascend, "aclrtQueryEventStatus", event) == 0
    assert query(ascend, "aclrtQueryEventStatus", event) == 1
    assert npu.order == ["note 1 of 1"]
    npu.note(stream, 2)
    assert query(ascend, "aclrtStreamQuery", stream) == 1
    assert query(ascend, "aclrtStreamQuery", stream) == 0


def test_waits_of_events_can_be_asked_for(ascend, npu):
    first, second, event = npu.stream(), npu.stream(), npu.event()
    assert query(ascend, "aclrtQueryEventWaitStatus", event) == 0
    npu.note(first, 1)
    npu.record(event, first)
    npu.wait(second, event)
    npu.synchronize(first)  # the event has happened, the wait not
    assert query(ascend, "aclrtQueryEventWaitStatus", event) == 1
    assert query(ascend, "aclrtQueryEventWaitStatus", event) == 0


def test_times_between_events(ascend, npu):
    stream, begin = npu.stream(), npu.event(acl.EVENT_SYNC | acl.EVENT_TIME_LINE)
    end, untimed = npu.event(acl.EVENT_TIME_LINE), npu.event()
    elapsed = ctypes.c_float(-1)
    ask = ("aclrtEventElapsedTime", ctypes.byref(elapsed))
    for event in (begin, end, untimed):
        npu.record(event, stream)
    assert ascend.code(*ask, begin, end) == 107006  # not reached
    npu.synchronize(stream)
    ascend.call(*ask, begin, end)
    assert elapsed.value >= 0
    assert ascend.code(*ask, begin, untimed) == 107006
    assert ascend.code(*ask, end, begin) == 107007
    for event in (begin, end):
        for word in range(100):
            npu.note(stream, word)
        npu.record(event, stream)
    npu.synchronize(stream)
    ascend.call(*ask, begin, end)
    times_us = [ctypes.c_uint64(), ctypes.c_uint64()]
    for event, time_us in zip((begin, end), times_us, strict=True):
        ascend.call("aclrtEventGetTimestamp", event, ctypes.byref(time_us))
    assert abs(1000 * elapsed.value - (times_us[1].value - times_us[0].value)) <= 2


def test_events_of_the_pool_have_an_end(ascend, npu):
    ascend.set_event_limit(1)
    first = ascend.make("aclrtCreateEventWithFlag", acl.EVENT_SYNC)
    result = ctypes.c_uint64()
    create = ("aclrtCreateEvent", ctypes.byref(result))
    assert ascend.code(*create) == acl.NO_EVENT_RESOURCE
    npu.event()  # from no pool
    ascend.call("aclrtDestroyEvent", first)
    ascend.call(*create)
    assert ascend.live("event") == 2


def test_streams_have_an_end(ascend, npu):
    streams = [npu.stream() for _ in range(1983)]  # and the default stream
    result = ctypes.c_uint64()
    create = ("aclrtCreateStream", ctypes.byref(result))
    assert ascend.code(*create) == acl.NO_STREAM_RESOURCE
    assert "all 1984 streams of device 0" in ascend.recent_text()
    n_contexts = ascend.live("context")
    context = ("aclrtCreateContext", ctypes.byref(result), 0)  # which has a default stream
    assert ascend.code(*context) == acl.NO_STREAM_RESOURCE
    assert ascend.live("context") == n_contexts
    ascend.call("aclrtDestroyStream", streams.pop())
    assert ascend.make("aclrtGetStreamAvailableNum") == 1
    ascend.call(*create)


def test_the_overflow_switch_and_status_of_a_stream(ascend, npu):
    stream, status = npu.stream(), npu.malloc()
    flag = ctypes.c_uint32()
    ctypes.memset(status, 0xFF, 64)
    for wanted in (1, 0):
        ascend.call("aclrtSetStreamOverflowSwitch", stream, wanted)
        ascend.call("aclrtGetStreamOverflowSwitch", stream, ctypes.byref(flag))
        assert flag.value == wanted
    ascend.call("aclrtGetOverflowStatus", status, 64, stream)
    ascend.call("aclrtResetOverflowStatus", stream)
    npu.synchronize(stream)
    assert ctypes.string_at(status, 64) == bytes(64)
    assert ascend.code("aclrtGetOverflowStatus", status, 32, stream) == acl.PARAM_INVALID
    for function in ("aclrtSetStreamOverflowSwitch", "aclrtResetOverflowStatus"):
        assert ascend.code(function, 77) == acl.STREAM_CONTEXT


def test_streams_have_ids_that_are_used_again(ascend, npu):
    def stream_id(stream):
        result = ctypes.c_int32(-1)
        ascend.call("aclrtStreamGetId", stream, ctypes.byref(result))
        return result.value

    first, second = npu.stream(), npu.stream()
    assert [stream_id(stream) for stream in (0, first, second)] == [0, 1, 2]
    ascend.call("aclrtDestroyStream", first)
    assert stream_id(npu.stream()) == 1


def test_destroying_a_stream_waits_unless_it_is_forced(ascend, npu):
    first, second = npu.stream(), npu.stream()
    npu.note(first, 1)
    npu.note(second, 2)
    ascend.call("aclrtDestroyStream", first)
    ascend.call("aclrtDestroyStreamForce", second)
    assert npu.order == ["note 1 of 1"]
    assert ascend.argument_bytes == 0
    assert ascend.code("aclrtSynchronizeStream", second) == acl.STREAM_CONTEXT


def test_attributes_of_streams(ascend, npu):
    stream, value = npu.stream(acl.PERSISTENT), (ctypes.c_uint64 * 2)(1, 0)
    ascend.call("aclrtSetStreamAttribute", stream, 4, value)
    value[0] = 9
    ascend.call("aclrtGetStreamAttribute", stream, 4, value)
    assert value[0] == 1
    assert ascend.code("aclrtSetStreamAttribute", stream, 9, value) == acl.PARAM_INVALID
    assert ascend.code("aclrtCreateStreamWithConfig", value, 0, 0x40) == acl.PARAM_INVALID
    flags = ctypes.c_uint32()
    ascend.call("aclrtStreamGetFlags", stream, ctypes.byref(flags))
    assert flags.value == acl.PERSISTENT


@pytest.mark.parametrize("how", ["stream", "device", "event"])
def test_a_wait_for_what_nobody_issues_ends(ascend, npu, how):
    stream, event = npu.stream(), npu.event()
    never = npu.external_event()
    npu.wait(stream, never)
    npu.record(event, stream)
    waits = {
        "stream": ("aclrtSynchronizeStreamWithTimeout", stream, 2),
        "device": ("aclrtSynchronizeDeviceWithTimeout", 2),
        "event": ("aclrtSynchronizeEventWithTimeout", event, 2),
    }
    assert ascend.code(*waits[how]) == (507047 if how == "event" else acl.STREAM_SYNC_TIMEOUT)
    npu.record(never, npu.stream())
    ascend.call(*waits[how])


def test_a_wait_without_a_time_lasts_ten_seconds(ascend, npu):
    stream, never = npu.stream(), npu.external_event()
    ascend.set_waits_take_time(False)
    npu.wait(stream, never)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.STREAM_SYNC_TIMEOUT
    assert ascend.waited_ms == 10_000
    timed = ("aclrtSynchronizeStreamWithTimeout", stream, 25)
    assert ascend.code(*timed) == acl.STREAM_SYNC_TIMEOUT
    assert ascend.waited_ms == 10_025
    ascend.call("aclrtDestroyStreamForce", stream)
    ascend.reset()
    assert ascend.waited_ms == 0


def test_another_thread_can_issue_what_a_wait_waits_for(ascend, npu):
    stream, other = npu.stream(), npu.stream()
    event = npu.external_event()
    npu.wait(stream, event)
    npu.note(stream, 1)

    def issue():
        npu.record(event, other)
        npu.synchronize(stream)

    ascend.in_thread(issue)
    assert npu.order == ["note 1 of 1"]


def test_eager_work_runs_when_it_is_issued(ascend, npu):
    stream = npu.stream()
    npu.note(stream, 1)
    ascend.set_eager(True)
    npu.note(stream, 2)
    assert npu.order == ["note 1 of 1", "note 2 of 1"]


def test_waiting_for_an_event_goes_no_further(ascend, npu):
    stream, event = npu.stream(), npu.event()
    npu.note(stream, 1)
    npu.record(event, stream)
    npu.note(stream, 2)
    ascend.call("aclrtSynchronizeEvent", event)
    assert npu.order == ["note 1 of 1"]


def test_what_is_dropped_with_its_stream_is_not_waited_for(ascend, npu):
    first, second, event = npu.stream(), npu.stream(), npu.event()
    npu.note(first, 1)
    npu.record(event, first)
    npu.wait(second, event)
    npu.note(second, 2)
    ascend.call("aclrtDestroyStreamForce", first)
    ascend.call("aclrtSynchronizeEvent", event)
    npu.synchronize(second)
    assert npu.order == ["note 2 of 1"]


def test_events_have_numbers_and_streams_priorities(ascend, npu):
    numbers, priority = [], ctypes.c_uint32()
    for event in (npu.event(), npu.event()):
        number = ctypes.c_uint32()
        ascend.call("aclrtGetEventId", event, ctypes.byref(number))
        numbers.append(number.value)
    assert numbers[0] != numbers[1]
    stream = ascend.make("aclrtCreateStreamWithConfig", 5, 0)
    ascend.call("aclrtStreamGetPriority", stream, ctypes.byref(priority))
    assert priority.value == 5


def test_callbacks_run_late_and_once(ascend, npu):
    stream = npu.stream()
    function = ascend.host_function(lambda: npu.order.append("called"))
    ascend.call("aclrtLaunchCallback", function, 0, 1, stream)
    assert npu.order == []
    npu.synchronize(stream)
    assert npu.order == ["called"]


def test_the_pool_has_so_many_events(ascend, npu):
    result = ctypes.c_uint64()
    create = ("aclrtCreateEvent", ctypes.byref(result))
    assert {ascend.code(*create) for _ in range(65536)} == {0}
    assert ascend.code(*create) == acl.NO_EVENT_RESOURCE
    ascend.call("aclrtDestroyEvent", result.value)
    ascend.call(*create)
    npu.event()  # from no pool
    ascend.reset()
    ascend.call(*create)


def test_each_device_has_streams_of_its_own(ascend, npu):
    before = ascend.streams_in_use()
    ascend.set_device_count(2)
    ascend.in_thread(lambda: [npu.stream() for _ in range(3)] and ascend.streams_in_use(1), 1)
    used = ascend.in_thread(lambda: npu.stream() and ascend.streams_in_use(1), device=1)
    assert used == 2  # with the default stream
    assert ascend.streams_in_use() == before
