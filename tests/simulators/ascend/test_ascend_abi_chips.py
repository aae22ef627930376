"""Rules of the simulated Ascend runtime that depend on the chip, the release or the driver.

The documentation says which calls fail there, but not with which code: the simulator returns the
codes of missing features and of exceeded limits.
"""

from __future__ import annotations

import ctypes
import json

import ascend_client as acl
import pytest
import torch
from ascend_kernels import AtenCapturer
from ascend_residents import live
from simulated_ascend import SimulatedAscendBackend, install

import offload
from offload.native import _native

OVER_LIMIT = 207012
EXTERNAL = 1  # a flag of one record or wait

CAPTURING = ["Ascend910B1", "Ascend910_9391", "Ascend950PR_9579", "Ascend310P3"]
NOT_CAPTURING = ["Ascend910A", "Ascend910B", "Ascend910ProB", "Ascend310B1"]
STREAMS = {
    "Ascend310B1": 512,
    "Ascend310P3": 1024,
    "Ascend910A": 2048,
    "Ascend910B4-1": 1984,
    "Ascend910_9391": 1984,
    "Ascend950PR_9579": 1984,
}


@pytest.fixture
def stream(npu):
    return npu.stream()


@pytest.mark.parametrize("soc_name", CAPTURING)
def test_chips_that_capture(soc_name, ascend, npu, stream):
    ascend.set_soc_name(soc_name)
    with npu.capture(stream) as models:
        npu.note(stream, 1)
    npu.run(models[0], stream)
    assert npu.order == ["note 1 of 1"]


@pytest.mark.parametrize("soc_name", NOT_CAPTURING)
def test_chips_that_do_not_capture(soc_name, ascend, npu, stream):
    ascend.set_soc_name(soc_name)
    begin = ("aclmdlRICaptureBegin", stream, acl.THREAD_LOCAL)
    assert ascend.code(*begin) == acl.FEATURE_NOT_SUPPORT
    assert (ascend.live("capture"), ascend.live("model")) == (0, 0)
    npu.note(stream, 1)  # the stream runs it at once
    npu.synchronize(stream)
    assert npu.order == ["note 1 of 1"]


@pytest.mark.parametrize("soc_name", ["Ascend310P3", *NOT_CAPTURING])
def test_chips_that_tell_no_tasks(soc_name, ascend, npu, stream):
    """Queried before the chip changes, as some chips capture nothing."""
    with npu.capture(stream) as models:
        npu.note(stream, 1)
    (model,) = models
    found, count = (ctypes.c_uint64 * 1)(), ctypes.c_uint32(1)
    ascend.call("aclmdlRIGetStreams", model, found, ctypes.byref(count))
    part = found[0]
    ascend.call("aclmdlRIGetTasksByStream", part, found, ctypes.byref(count))
    task, space = found[0], ctypes.create_string_buffer(256)
    ascend.call("aclmdlRITaskGetParams", task, space)
    ascend.set_soc_name(soc_name)
    refused = [
        ("aclmdlRIGetStreams", model, found, ctypes.byref(count)),
        ("aclmdlRIGetTasksByStream", part, found, ctypes.byref(count)),
        ("aclmdlRITaskGetType", task, space),
        ("aclmdlRITaskGetSeqId", task, space),
        ("aclmdlRITaskGetParams", task, space),
        ("aclmdlRITaskSetParams", task, space),
        ("aclmdlRITaskDisable", task),
        ("aclmdlRIKernelTaskGetAttribute", task, 1, space),
        ("aclmdlRIUpdate", model),
        ("aclmdlRICondHandleCreate", model, 0, 0, space),
    ]
    codes = {call[0]: ascend.code(*call) for call in refused}
    assert set(codes.values()) == {acl.FEATURE_NOT_SUPPORT}, codes
    npu.run(model, stream)
    assert npu.order == ["note 1 of 1"]


@pytest.mark.parametrize(("soc_name", "n_streams"), STREAMS.items())
def test_streams_are_those_of_the_chip(soc_name, n_streams, ascend, npu):
    ascend.set_soc_name(soc_name)
    assert ascend.make("aclrtGetStreamAvailableNum") == n_streams - 1  # the default stream
    for _ in range(n_streams - 1):
        npu.stream()
    create = ("aclrtCreateStream", ctypes.byref(ctypes.c_uint64()))
    assert ascend.code(*create) == acl.NO_STREAM_RESOURCE
    assert _native.ascend_stream_budget(soc_name) == n_streams


def offset_code(ascend, npu, stream):
    word = npu.words(0)
    cell = npu.words(word, word)
    copy = ("aclrtMemcpyAsyncWithOffset", cell, 8, 0, cell + 8, 8, 0, acl.INNER_DEVICE_TO_DEVICE)
    code = ascend.code(*copy, stream)
    npu.synchronize(stream)
    return code


@pytest.mark.parametrize("soc_name", ["Ascend310P3", "Ascend310B1"])
def test_chips_without_copies_by_offset(soc_name, ascend, npu, stream):
    assert offset_code(ascend, npu, stream) == 0
    ascend.set_soc_name(soc_name)
    assert offset_code(ascend, npu, stream) == acl.FEATURE_NOT_SUPPORT


@pytest.mark.parametrize("soc_name", ["Ascend910A", "Ascend910_9391", "Ascend950PR_9579"])
def test_chips_and_firmware_with_copies_by_offset(soc_name, ascend, npu, stream):
    ascend.set_soc_name(soc_name)
    assert offset_code(ascend, npu, stream) == 0
    ascend.set_copies_by_offset(False)  # as older firmware
    assert offset_code(ascend, npu, stream) == acl.FEATURE_NOT_SUPPORT


def test_310p_has_few_events_in_its_pool(ascend, npu):
    ascend.set_soc_name("Ascend310P3")
    for _ in range(1023):
        ascend.make("aclrtCreateEventWithFlag", acl.EVENT_SYNC)
    create = ("aclrtCreateEvent", ctypes.byref(ctypes.c_uint64()))
    assert ascend.code(*create) == acl.NO_EVENT_RESOURCE
    npu.event()  # from no pool


@pytest.mark.parametrize("form", ["build", "capture"])
@pytest.mark.parametrize("soc_name", ["Ascend310P3", "Ascend910A"])
def test_kernels_of_ones_own_on_other_chips(soc_name, form, ascend, monkeypatch):
    """A build needs none of this; a capture that the chip refuses leaves nothing behind."""
    backend = SimulatedAscendBackend(AtenCapturer(ascend), form=form)
    install(ascend, monkeypatch, backend)
    ascend.set_soc_name(soc_name)
    captured = offload.capture(torch.sin, torch.ones(3))
    before = live(ascend)
    if form == "capture" and soc_name in NOT_CAPTURING:
        with pytest.raises(offload.ExecutionError, match="207000 ACL_ERROR_RT_FEATURE_NOT_SUPPORT"):
            captured.load(backend.name)
        assert live(ascend) == before
        return
    with captured.load(backend.name) as run:
        said = next(one for one in run.notes() if one.startswith("streams: "))
        assert "this runtime does not report how many a model has" in said


@pytest.mark.parametrize("function", ["aclrtRecordEvent", "aclrtStreamWaitEvent"])
def test_a_captured_record_or_wait_that_fails_invalidates_the_capture(
    function, ascend, npu, stream
):
    event = npu.event()
    npu.begin(stream)
    npu.record(event, stream)
    call = (function, event, stream) if "Record" in function else (function, stream, event)
    ascend.fail(function, acl.INTERNAL_ERROR)
    assert ascend.code(*call) == acl.INTERNAL_ERROR
    assert npu.launch_host(stream, npu.note_function, 1) == acl.STREAM_CAPTURE_INVALIDATED
    assert npu.end_code(stream) == acl.STREAM_CAPTURE_INVALIDATED
    assert (ascend.live("capture"), ascend.live("model")) == (0, 0)


@pytest.mark.parametrize(("version", "tells"), [("8.5", False), ("9.0", False), ("9.1", True)])
def test_arguments_are_printed_since_9_1(version, tells, ascend, npu, stream, tmp_path):
    with npu.capture(stream) as models:
        npu.note(stream, 1)
    ascend.set_personality(version)
    path = tmp_path / "model.json"
    ascend.call("aclmdlRIDebugJsonPrint", models[0], str(path).encode(), 1)
    (kernel,) = (event["args"] for event in json.loads(path.read_text()))
    assert kernel["Task Type"] == "KERNEL"
    assert ("Kernel Args" in kernel, "Kernel Args Size" in kernel) == (tells, tells)


def record_by_flag(event, stream):
    return ("aclrtRecordEventWithFlag", event, stream, EXTERNAL)


def wait_by_flag(event, stream):
    return ("aclrtStreamWaitEventWithFlag", stream, event, 0, EXTERNAL)


@pytest.mark.parametrize("call", [record_by_flag, wait_by_flag])
def test_by_its_own_flag_a_model_records_or_awaits_an_event_once(call, ascend, npu, stream):
    event, other = npu.event(), npu.event()
    npu.begin(stream)
    ascend.call(*call(event, stream))
    assert ascend.code(*call(event, stream)) == acl.FEATURE_NOT_SUPPORT
    ascend.call(*call(other, stream))
    npu.end(stream)
    with npu.capture(stream):  # another model may
        ascend.call(*call(event, stream))


@pytest.mark.parametrize("call", [record_by_flag, wait_by_flag])
def test_the_flag_of_a_call_needs_software_sq(call, ascend, npu, stream):
    event = npu.event()
    ascend.set_software_sq(False)
    npu.begin(stream)
    assert ascend.code(*call(event, stream)) == acl.FEATURE_NOT_SUPPORT
    npu.note(stream, 1)
    npu.end(stream)


def test_tasks_under_update_are_limited(ascend, npu, stream):
    """To 1024 * 1024, too many for a test."""
    groups = []
    with npu.capture(stream):
        for n_tasks in (2, 1, 3):
            ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
            for word in range(n_tasks):
                npu.note(stream, word)
            group = ctypes.c_uint64()
            ascend.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
            groups.append(group.value)
    ascend.set_update_limit(3)
    first, second, third = npu.stream(), npu.stream(), npu.stream()
    begin = "aclmdlRICaptureTaskUpdateBegin"
    ascend.call(begin, first, groups[0])
    assert ascend.code(begin, second, groups[2]) == OVER_LIMIT
    ascend.call(begin, second, groups[1])
    assert ascend.code(begin, third, groups[1]) == OVER_LIMIT
    npu.note(second, 5)
    ascend.call("aclmdlRICaptureTaskUpdateEnd", second)
    ascend.call(begin, third, groups[1])
