"""Capture on the simulated Ascend runtime: every refusal with its code and its consequences."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

NONE, ACTIVE, INVALIDATED = 0, 1, 2
CPU_SCHEDULE, DEVICE_USE_ONLY = 0x10, 0x20


@pytest.fixture
def stream(npu):
    return npu.stream()


def test_what_is_captured_does_not_run(ascend, npu, stream):
    source, destination = npu.words(1), npu.words(0)
    with npu.capture(stream) as models:
        status, model = npu.info(stream)
        assert status == ACTIVE
        npu.add(stream, source, destination, 5)
        npu.add(stream, destination, destination, 2)
    assert models == [model]
    assert npu.info(stream) == (NONE, 0)
    assert acl.peek(destination) == (0,)
    npu.upload(source, acl.u64(10))
    npu.execute(model, stream)
    assert npu.order == []
    npu.synchronize(stream)
    assert acl.peek(destination) == (17,)
    npu.run(model, 0)  # on the default stream
    ascend.call("aclmdlRIExecute", model, -1)
    assert npu.order == ["add 5", "add 2"] * 3


def test_arguments_in_our_memory_are_read_at_every_execution(npu, stream):
    block = npu.words(1)
    with npu.capture(stream) as models:
        npu.launch(stream, npu.note_function, block, 8)
        assert npu.launch_host(stream, npu.note_function, 7) == 0
    for word in (2, 3):
        npu.upload(block, acl.u64(word))
        npu.run(models[0], stream)
    assert npu.order == ["note 2 of 1", "note 7 of 1", "note 3 of 1", "note 7 of 1"]


def test_a_staged_copy_keeps_the_bytes_of_the_capture(ascend, npu, stream):
    host, staged, late = npu.pinned(acl.u64(1)), npu.words(0), npu.words(0)
    with npu.capture(stream) as models:
        for to, kind in ((staged, acl.HOST_TO_BUFFER_TO_DEVICE), (late, acl.HOST_TO_DEVICE)):
            ascend.call("aclrtMemcpyAsync", to, 8, host, 8, kind, stream)
    ctypes.c_uint64.from_address(host).value = 2
    npu.run(models[0], stream)
    assert (acl.peek(staged), acl.peek(late)) == ((1,), (2,))


@pytest.mark.parametrize(
    ("make", "mode", "code"),
    [
        (lambda npu: 0, acl.GLOBAL, acl.PARAM_INVALID),
        (lambda npu: npu.stream(), 3, acl.PARAM_INVALID),
        (
            lambda npu: npu.ascend.make("aclrtCtxGetCurrentDefaultStream"),
            acl.GLOBAL,
            acl.FEATURE_NOT_SUPPORT,
        ),
        (lambda npu: npu.stream(CPU_SCHEDULE), acl.GLOBAL, acl.INTERNAL_ERROR),
        (lambda npu: npu.stream(DEVICE_USE_ONLY), acl.GLOBAL, acl.INTERNAL_ERROR),
        (lambda npu: 12345, acl.GLOBAL, acl.STREAM_CONTEXT),
    ],
)
def test_begin_is_refused(ascend, npu, make, mode, code):
    assert ascend.code("aclmdlRICaptureBegin", make(npu), mode) == code
    assert (ascend.live("capture"), ascend.live("model")) == (0, 0)


def test_begin_is_refused_on_a_stream_of_another_context(ascend, npu, stream):
    ascend.make("aclrtCreateContext", 0)
    assert ascend.code("aclmdlRICaptureBegin", stream, acl.GLOBAL) == acl.STREAM_CONTEXT


def test_begin_is_refused_where_the_stream_captures(ascend, npu, stream):
    with npu.capture(stream):
        assert ascend.code("aclmdlRICaptureBegin", stream, acl.GLOBAL) == acl.STREAM_CAPTURED
        assert npu.info(stream)[0] == ACTIVE


def test_waiting_for_a_capturing_stream_is_refused(ascend, npu, stream):
    status, other = ctypes.c_int(), npu.stream()
    status_of_overflow = npu.malloc()
    with npu.capture(other) as models:
        npu.note(other, 1)
    with npu.capture(stream, acl.RELAXED):
        refused = [
            ("aclrtSynchronizeStream", stream),
            ("aclrtSynchronizeStreamWithTimeout", stream, 1),
            ("aclrtStreamQuery", stream, ctypes.byref(status)),
            ("aclrtDestroyStream", stream),
            ("aclrtDestroyStreamForce", stream),
            ("aclmdlRIExecuteAsync", models[0], stream),
            ("aclrtSynchronizeDevice",),
            ("aclrtSynchronizeDeviceWithTimeout", 1),
            ("aclmdlRICaptureTaskUpdateEnd", stream),
            ("aclrtSetStreamOverflowSwitch", stream, 1),
            ("aclrtResetOverflowStatus", stream),
            ("aclrtGetOverflowStatus", status_of_overflow, 64, stream),
        ]
        assert [ascend.code(*call) for call in refused] == [acl.STREAM_CAPTURED] * len(refused)
        npu.note(stream, 2)
        npu.synchronize(other)  # it does not capture
        assert npu.info(stream)[0] == ACTIVE


def test_a_context_whose_stream_captures_is_not_waited_for_or_destroyed(ascend, npu):
    memory, first = npu.malloc(), ascend.make("aclrtGetCurrentContext")
    context = ascend.make("aclrtCreateContext", 0)
    stream = npu.stream()
    with npu.capture(stream):
        assert ascend.code("aclrtFreeWithDevSync", memory) == acl.STREAM_CAPTURED
        assert ascend.code("aclrtDestroyContext", context) == acl.STREAM_CAPTURED
        assert npu.info(stream)[0] == ACTIVE
        npu.note(stream, 1)
    ascend.call("aclrtFreeWithDevSync", memory)
    ascend.call("aclrtDestroyContext", context)
    ascend.call("aclrtSetCurrentContext", first)


def test_asking_for_a_captured_event_is_refused(ascend, npu, stream):
    event, elapsed, status = (
        npu.event(acl.EVENT_SYNC | acl.EVENT_TIME_LINE),
        ctypes.c_float(),
        ctypes.c_uint64(),
    )
    with npu.capture(stream):
        npu.record(event, stream)
        refused = [
            ("aclrtSynchronizeEvent", event),
            ("aclrtSynchronizeEventWithTimeout", event, 1),
            ("aclrtQueryEventStatus", event, ctypes.byref(status)),
            ("aclrtQueryEvent", event, ctypes.byref(status)),
            ("aclrtQueryEventWaitStatus", event, ctypes.byref(status)),
            ("aclrtEventElapsedTime", ctypes.byref(elapsed), event, event),
            ("aclrtEventGetTimestamp", event, ctypes.byref(status)),
        ]
        assert [ascend.code(*call) for call in refused] == [acl.EVENT_CAPTURED] * len(refused)
    npu.record(event, stream)  # outside the capture
    npu.synchronize(stream)
    ascend.call("aclrtSynchronizeEvent", event)


def test_the_default_stream_may_not_touch_a_captured_event(ascend, npu, stream):
    event, other = npu.event(), npu.event()
    with npu.capture(stream):
        npu.record(event, stream)
        for call in (
            ("aclrtRecordEvent", event, 0),
            ("aclrtStreamWaitEvent", 0, event),
        ):
            assert ascend.code(*call) == acl.STREAM_CAPTURE_IMPLICIT
        npu.record(other, 0)
        assert npu.info(stream)[0] == ACTIVE
    npu.record(event, 0)


# The thread's exchanged mode, the mode of its own capture (None: no capture), that of another
# thread's capture, and whether it may wait.
MODE_RULE = [
    (acl.GLOBAL, None, None, True),
    (acl.GLOBAL, acl.GLOBAL, None, False),
    (acl.GLOBAL, acl.THREAD_LOCAL, None, False),
    (acl.GLOBAL, acl.RELAXED, None, True),
    (acl.GLOBAL, None, acl.GLOBAL, False),
    (acl.GLOBAL, None, acl.THREAD_LOCAL, True),
    (acl.GLOBAL, acl.RELAXED, acl.GLOBAL, False),
    (acl.THREAD_LOCAL, acl.GLOBAL, None, False),
    (acl.THREAD_LOCAL, acl.THREAD_LOCAL, None, False),
    (acl.THREAD_LOCAL, acl.RELAXED, None, True),
    (acl.THREAD_LOCAL, None, acl.GLOBAL, True),
    (acl.THREAD_LOCAL, None, acl.THREAD_LOCAL, True),
    (acl.RELAXED, acl.GLOBAL, acl.GLOBAL, True),
]


@pytest.mark.parametrize(("exchanged", "own", "others", "allowed"), MODE_RULE)
def test_modes_forbid_calls_that_wait(ascend, npu, exchanged, own, others, allowed):
    device, host, side = npu.malloc(), npu.pinned(bytes(64)), npu.stream()
    pageable = ctypes.create_string_buffer(64)
    mine, theirs = npu.stream(), npu.stream()
    if others is not None:
        ascend.in_thread(lambda: npu.begin(theirs, others))
    if own is not None:
        npu.begin(mine, own)
    with npu.exchanged(exchanged):
        calls = [
            ("aclrtMemcpy", device, 8, host, 8, acl.HOST_TO_DEVICE),
            ("aclrtMemcpy2d", device, 8, host, 8, 8, 2, acl.HOST_TO_DEVICE),
            ("aclrtMemset", device, 8, 0, 8),
        ]
        expected = 0 if allowed else acl.CAPTURE_MODE_NOT_SUPPORT
        assert [ascend.code(*call) for call in calls] == [expected] * 3
        copy = ("aclrtMemcpyAsync", device, 8, pageable, 8, acl.HOST_TO_DEVICE, side)
        assert ascend.code(*copy) == (0 if allowed else acl.CAPTURE_MODE_BLOCK_ASYNC)
        npu.malloc()  # always legal
    if own is not None:
        assert npu.info(mine)[0] == ACTIVE
        npu.end(mine)


def test_there_are_three_modes(ascend):
    mode = ctypes.c_int(3)
    exchange = ("aclmdlRICaptureThreadExchangeMode", ctypes.byref(mode))
    assert ascend.code(*exchange) == acl.PARAM_INVALID
    mode.value = acl.RELAXED
    ascend.call(*exchange)
    assert mode.value == acl.GLOBAL
    ascend.call(*exchange)
    assert mode.value == acl.RELAXED


def test_a_capture_takes_no_pageable_memory(ascend, npu, stream):
    device, pageable = npu.malloc(), ctypes.create_string_buffer(64)
    host = npu.pinned(bytes(64))
    with npu.capture(stream, acl.RELAXED):
        copy = ("aclrtMemcpyAsync", device, 8, pageable, 8)
        assert ascend.code(*copy, acl.HOST_TO_DEVICE, stream) == acl.PARAM_INVALID
        assert ascend.code(*copy, acl.HOST_TO_BUFFER_TO_DEVICE, stream) == 0
        to_host = ("aclrtMemcpyAsync", host, 8, host + 8, 8, acl.HOST_TO_HOST, stream)
        assert ascend.code(*to_host) == acl.FEATURE_NOT_SUPPORT
        assert npu.info(stream)[0] == ACTIVE


def test_end_is_refused_where_nothing_or_another_stream_captures(npu, stream):
    side, event = npu.stream(), npu.event()
    assert npu.end_code(stream) == acl.STREAM_NOT_CAPTURED
    with npu.capture(stream):
        npu.record(event, stream)
        npu.wait(side, event)
        assert npu.end_code(side) == acl.STREAM_CAPTURE_UNMATCHED
        npu.record(event, side)
        npu.wait(stream, event)


def dropped(ascend, npu, stream) -> bool:
    counts = [ascend.live(kind) for kind in ("capture", "model", "task", "model stream")]
    return npu.info(stream) == (NONE, 0) and counts == [0] * 4 and ascend.argument_bytes == 0


@pytest.mark.parametrize("mode", [acl.GLOBAL, acl.THREAD_LOCAL, acl.RELAXED])
def test_end_on_another_thread_drops_the_capture_unless_it_is_relaxed(ascend, npu, stream, mode):
    npu.begin(stream, mode)
    npu.note(stream, 1)
    code = ascend.in_thread(lambda: npu.end_code(stream))
    if mode == acl.RELAXED:
        assert code == 0
        assert ascend.live("model") == 1
    else:
        assert code == acl.STREAM_CAPTURE_WRONG_THREAD
        assert dropped(ascend, npu, stream)


@pytest.mark.parametrize("last", ["wait", "kernel"])
def test_end_with_a_stream_that_was_not_joined_drops_the_capture(ascend, npu, stream, last):
    side, event = npu.stream(), npu.event()
    npu.begin(stream)
    npu.record(event, stream)
    npu.wait(side, event)
    if last == "kernel":
        npu.record(event, side)
        npu.wait(stream, event)
        npu.note(side, 1)
    assert npu.end_code(stream) == acl.STREAM_UNJOINED
    assert dropped(ascend, npu, stream)
    assert npu.info(side) == (NONE, 0)


def test_a_failed_submission_invalidates_the_capture(ascend, npu, stream):
    npu.begin(stream)
    npu.note(stream, 1)
    ascend.fail("aclrtLaunchKernelWithHostArgs", acl.INTERNAL_ERROR)
    assert npu.launch_host(stream, npu.note_function, 2) == acl.INTERNAL_ERROR
    assert npu.info(stream)[0] == INVALIDATED
    assert npu.launch_host(stream, npu.note_function, 3) == acl.STREAM_CAPTURE_INVALIDATED
    assert ascend.code("aclmdlRICaptureBegin", stream, acl.GLOBAL) == acl.STREAM_CAPTURED
    assert npu.end_code(stream) == acl.STREAM_CAPTURE_INVALIDATED
    assert dropped(ascend, npu, stream)


def test_a_refused_call_leaves_the_capture_as_it_was(ascend, npu, stream):
    device = npu.malloc()
    with npu.capture(stream) as models:
        npu.note(stream, 1)
        assert npu.launch_host(stream, 12345, 2) == acl.PARAM_INVALID
        copy = ("aclrtMemcpyAsync", device, 8, 0, 8, acl.HOST_TO_DEVICE, stream)
        assert ascend.code(*copy) == acl.PARAM_INVALID
        npu.note(stream, 3)
    npu.run(models[0], stream)
    assert npu.order == ["note 1 of 1", "note 3 of 1"]


def test_models_use_up_streams_where_the_firmware_binds_them(ascend, npu, stream):
    ascend.set_software_sq(False)
    ascend.set_stream_limit(4)  # the default stream, ours, one for the model and one more
    ascend.set_stream_depth(2)
    npu.begin(stream)
    assert ascend.streams_in_use() == 3
    for word in range(4):
        npu.note(stream, word)
    assert ascend.streams_in_use() == 4
    assert npu.launch_host(stream, npu.note_function, 4) == acl.NO_STREAM_RESOURCE
    assert npu.info(stream)[0] == INVALIDATED
    assert npu.end_code(stream) == acl.STREAM_CAPTURE_INVALIDATED
    assert ascend.streams_in_use() == 2
    other, last = npu.stream(), npu.stream()
    assert ascend.code("aclmdlRICaptureBegin", stream, acl.GLOBAL) == acl.NO_STREAM_RESOURCE
    assert (ascend.live("capture"), ascend.live("model")) == (0, 0)
    ascend.set_software_sq(True)
    npu.begin(stream)
    assert (ascend.streams_in_use(), ascend.live("model stream")) == (4, 1)
    assert other != last
