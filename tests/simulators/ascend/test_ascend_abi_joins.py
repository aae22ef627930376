"""Streams and threads of one capture on the simulated Ascend runtime: joins and allowed waits."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

NONE, ACTIVE = 0, 1  # aclmdlRICaptureStatus


@pytest.fixture
def stream(npu):
    return npu.stream()


def test_other_streams_join_through_events(npu, stream):
    side, fork, join = npu.stream(), npu.event(), npu.event()
    with npu.capture(stream) as models:
        npu.note(stream, 1)
        npu.record(fork, stream)
        npu.wait(side, fork)
        assert npu.info(side) == npu.info(stream)
        npu.note(side, 2)
        npu.note(stream, 3)
        npu.record(join, side)
        npu.wait(stream, join)
        npu.note(stream, 4)
    assert npu.info(side) == (NONE, 0)
    npu.run(models[0], stream)
    assert npu.order[0] == "note 1 of 1"
    assert npu.order[3] == "note 4 of 1"
    assert sorted(npu.order[1:3]) == ["note 2 of 1", "note 3 of 1"]


def test_an_event_that_is_missing_in_the_capture_shows(npu, stream):
    """The side stream's work is ordered only with work before its wait."""
    side, fork, join = npu.stream(), npu.event(), npu.event()
    with npu.capture(stream) as models:
        npu.record(fork, stream)
        npu.wait(side, fork)
        npu.note(stream, 1)
        npu.note(side, 2)
        npu.record(join, side)
        npu.wait(stream, join)
    npu.run(models[0], stream)
    assert npu.order == ["note 2 of 1", "note 1 of 1"]


def test_dependencies_on_what_is_not_captured_are_refused(ascend, npu, stream):
    outside, never, other = npu.event(), npu.event(), npu.stream()
    npu.record(outside, other)
    with npu.capture(stream):
        wait = ("aclrtStreamWaitEvent", stream)
        assert ascend.code(*wait, outside) == acl.CAPTURE_DEPENDENCY
        assert ascend.code(*wait, never) == acl.CAPTURE_DEPENDENCY
        assert npu.info(stream)[0] == ACTIVE


def test_events_of_another_model_are_refused(ascend, npu, stream):
    other, event = npu.stream(), npu.event()
    npu.begin(other)
    npu.record(event, other)
    with npu.capture(stream):
        code = ascend.code("aclrtStreamWaitEvent", stream, event)
        assert code == acl.STREAM_CAPTURE_CONFLICT
    npu.end(other)
    free = npu.stream()
    assert ascend.code("aclrtStreamWaitEvent", free, event) == acl.STREAM_CAPTURE_CONFLICT


def test_events_of_the_pool_order_no_streams_of_a_model(ascend, npu, stream):
    pooled, without_sync = ascend.make("aclrtCreateEvent"), npu.event(acl.EVENT_TIME_LINE)
    with npu.capture(stream):
        for event in (pooled, without_sync):
            code = ascend.code("aclrtRecordEvent", event, stream)
            assert code == acl.FEATURE_NOT_SUPPORT
            code = ascend.code("aclrtStreamWaitEvent", stream, event)
            assert code == acl.FEATURE_NOT_SUPPORT


def test_a_stream_is_joined_by_way_of_another(npu, stream):
    first, second = npu.stream(), npu.stream()
    fork, inner, join = npu.event(), npu.event(), npu.event()
    with npu.capture(stream) as models:
        npu.record(fork, stream)
        npu.wait(first, fork)
        npu.wait(second, fork)
        npu.note(first, 1)
        npu.record(inner, first)
        npu.wait(second, inner)
        npu.note(second, 2)
        npu.record(join, second)
        npu.wait(stream, join)
    npu.run(models[0], stream)
    assert npu.order == ["note 1 of 1", "note 2 of 1"]


def test_an_older_event_takes_nothing_back(npu, stream):
    side, fork, older, newer = npu.stream(), npu.event(), npu.event(), npu.event()
    with npu.capture(stream):
        npu.record(fork, stream)
        npu.wait(side, fork)
        npu.record(older, side)
        npu.note(side, 1)
        npu.record(newer, side)
        npu.wait(stream, newer)
        npu.wait(stream, older)


def test_records_at_the_end_of_a_stream_need_nobody_to_wait(npu, stream):
    side, fork, join, unused = npu.stream(), npu.event(), npu.event(), npu.event()
    with npu.capture(stream):
        npu.record(fork, stream)
        npu.wait(side, fork)
        npu.record(join, side)
        npu.wait(stream, join)
        npu.record(unused, side)


@pytest.mark.parametrize(("first", "order"), [(True, [1, 2]), (False, [2, 1])])
def test_either_stream_of_a_model_goes_first_where_it_may(ascend, npu, stream, first, order):
    side, fork, join = npu.stream(), npu.event(), npu.event()
    ascend.set_first_stream_first(first)
    with npu.capture(stream) as models:
        npu.record(fork, stream)
        npu.wait(side, fork)
        npu.note(side, 2)
        npu.record(join, side)
        npu.note(stream, 1)
        npu.wait(stream, join)
    npu.run(models[0], stream)
    assert npu.order == [f"note {word} of 1" for word in order]


def copy_code(npu):
    """The code of a copy that waits."""
    address = npu.malloc()
    return npu.ascend.code("aclrtMemcpy", address, 8, bytes(8), 8, acl.HOST_TO_DEVICE)


def test_each_thread_has_its_own_mode(ascend, npu, stream):
    npu.begin(stream, acl.GLOBAL)
    with npu.exchanged(acl.RELAXED):
        assert copy_code(npu) == 0
        assert ascend.in_thread(lambda: copy_code(npu)) == acl.CAPTURE_MODE_NOT_SUPPORT
    npu.end(stream)


@pytest.mark.parametrize("modes", [(acl.GLOBAL, acl.RELAXED), (acl.RELAXED, acl.GLOBAL)])
def test_the_strictest_of_a_threads_captures_counts(npu, modes):
    streams = npu.stream(), npu.stream()
    for one, mode in zip(streams, modes, strict=True):
        npu.begin(one, mode)
    with npu.exchanged(acl.THREAD_LOCAL):
        assert copy_code(npu) == acl.CAPTURE_MODE_NOT_SUPPORT
    for one in streams:
        npu.end(one)


def test_a_capture_without_memory_for_arguments_is_invalid(ascend, npu, stream):
    npu.begin(stream)
    ascend.set_memory_limit(4096)
    assert npu.launch_host(stream, npu.note_function, 1) == acl.MEMORY_ALLOCATION
    assert npu.info(stream)[0] == 2
    assert npu.end_code(stream) == acl.STREAM_CAPTURE_INVALIDATED


def test_a_refused_end_gives_no_model(ascend, stream):
    model = ctypes.c_uint64(1)
    end = ("aclmdlRICaptureEnd", stream, ctypes.byref(model))
    assert ascend.code(*end) == acl.STREAM_NOT_CAPTURED
    assert model.value == 0


def test_a_stream_of_a_model_takes_so_many_tasks(ascend, npu, stream):
    ascend.set_software_sq(False)
    npu.begin(stream)
    for word in range(2048):
        npu.note(stream, word)
    assert ascend.streams_in_use() == 3
    npu.note(stream, 2048)
    assert ascend.streams_in_use() == 4
    npu.end(stream)


def test_nobody_joins_a_capture_whose_context_went(ascend, npu, stream):
    event = npu.event()
    npu.begin(stream)
    npu.record(event, stream)
    ascend.call("aclrtResetDevice", 0)
    ascend.call("aclrtSetDevice", 0)
    wait = ("aclrtStreamWaitEvent", npu.stream(), event)
    assert ascend.code(*wait) == acl.STREAM_CAPTURE_INVALIDATED
