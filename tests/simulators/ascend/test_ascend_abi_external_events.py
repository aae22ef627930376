"""External events of the simulated Ascend runtime: set, waited for and reset in turn."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest


def test_a_record_or_wait_can_be_external_by_its_flag(ascend, npu):
    stream, outside, event = npu.stream(), npu.stream(), npu.event()
    with npu.capture(stream) as models:
        ascend.call("aclrtStreamWaitEventWithFlag", stream, event, 0, 1)
        npu.note(stream, 1)
    npu.execute(models[0], stream)
    npu.note(outside, 2)
    ascend.call("aclrtRecordEventWithFlag", event, outside, 1)
    npu.synchronize(stream)
    assert npu.order == ["note 2 of 1", "note 1 of 1"]


@pytest.mark.parametrize("first", [False, True])
def test_other_streams_go_on_while_one_waits_outside(ascend, npu, first):
    """Either the oldest or the newest runs first."""
    waiting, old, new = npu.stream(), npu.stream(), npu.stream()
    event = npu.external_event()
    ascend.set_first_stream_first(first)
    npu.wait(waiting, event)
    for word, stream in enumerate((old, new)):
        npu.note(stream, word)
        npu.record(event, stream)
    npu.synchronize(waiting)
    assert npu.order == ["note 0 of 1" if first else "note 1 of 1"]


def test_external_events_are_set_and_reset_when_it_is_their_turn(ascend, npu):
    waiting, setting = npu.stream(), npu.stream()
    event = npu.external_event()
    npu.note(setting, 1)
    npu.record(event, setting)
    npu.wait(waiting, event)
    npu.note(waiting, 2)
    npu.note(waiting, 3)
    ascend.call("aclrtResetEvent", event, waiting)
    npu.synchronize(waiting)
    assert npu.order == ["note 1 of 1", "note 2 of 1", "note 3 of 1"]
    npu.wait(waiting, event)
    timed = ("aclrtSynchronizeStreamWithTimeout", waiting, 0)
    assert ascend.code(*timed) == acl.STREAM_SYNC_TIMEOUT
    npu.record(event, setting)
    ascend.call("aclrtResetEvent", event, setting)
    npu.note(setting, 4)
    npu.record(event, setting)
    reached = npu.event()
    npu.record(reached, setting)
    npu.note(setting, 5)
    ascend.call("aclrtSynchronizeEvent", reached)
    assert npu.order[-1] == "note 4 of 1"
    npu.synchronize(waiting)


def test_events_that_a_model_can_capture_are_not_reset(ascend, npu):
    stream, event = npu.stream(), npu.event()
    npu.record(event, stream)
    assert ascend.code("aclrtResetEvent", event, stream) == acl.FEATURE_NOT_SUPPORT
    with npu.capture(stream):
        npu.record(event, stream)
        assert ascend.code("aclrtResetEvent", event, stream) == acl.FEATURE_NOT_SUPPORT


def test_the_host_neither_waits_for_an_external_event_nor_asks_it(ascend, npu):
    stream, event, timed = npu.stream(), npu.external_event(), npu.event(acl.EVENT_TIME_LINE)
    npu.record(event, stream)
    npu.record(timed, stream)
    npu.synchronize(stream)
    result = ctypes.byref(ctypes.c_uint64())
    calls = [
        ("aclrtSynchronizeEvent", event),
        ("aclrtSynchronizeEventWithTimeout", event, 1),
        ("aclrtQueryEventStatus", event, result),
        ("aclrtQueryEvent", event, result),
        ("aclrtQueryEventWaitStatus", event, result),
        ("aclrtEventElapsedTime", result, event, timed),
        ("aclrtEventElapsedTime", result, timed, event),
        ("aclrtEventGetTimestamp", event, result),
    ]
    assert [ascend.code(*call) for call in calls] == [acl.FEATURE_NOT_SUPPORT] * len(calls)


def test_a_reset_waits_for_its_turn(ascend, npu):
    first, second = npu.stream(), npu.stream()
    event = npu.external_event()
    npu.record(event, first)
    npu.synchronize(first)
    ascend.call("aclrtResetEvent", event, first)
    npu.wait(second, event)
    ascend.call("aclrtSynchronizeStreamWithTimeout", second, 0)  # it is still set
    npu.synchronize(first)
    npu.wait(second, event)
    timed = ("aclrtSynchronizeStreamWithTimeout", second, 0)
    assert ascend.code(*timed) == acl.STREAM_SYNC_TIMEOUT


def test_external_events_cross_the_border_of_a_model(ascend, npu):
    stream, outside, event = npu.stream(), npu.stream(), npu.external_event()
    with npu.capture(stream) as models:
        npu.wait(stream, event)
        ascend.call("aclrtResetEvent", event, stream)
        npu.note(stream, 1)
    for word in (2, 3):
        npu.execute(models[0], stream)
        assert (
            ascend.code("aclrtSynchronizeStreamWithTimeout", stream, 0) == acl.STREAM_SYNC_TIMEOUT
        )
        npu.note(outside, word)
        npu.record(event, outside)
        npu.synchronize(stream)
    assert npu.order == ["note 2 of 1", "note 1 of 1", "note 3 of 1", "note 1 of 1"]
