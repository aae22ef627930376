"""Arguments that the simulated Ascend runtime refuses: null, out of range, or of nothing known."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

SPACE = (ctypes.c_uint64 * 16)()
UNKNOWN = 12345

# Each needs a stream, an event and a word of device memory, by these names.
REFUSED = [
    ("aclrtCreateStreamWithConfig", SPACE, 8, 0),
    ("aclrtCreateStreamWithConfig", 0, 0, 0),
    ("aclrtDestroyStream", 0),
    ("aclrtDestroyStreamForce", 0),
    ("aclrtSynchronizeStreamWithTimeout", "stream", -2),
    ("aclrtSynchronizeDeviceWithTimeout", -2),
    ("aclrtStreamQuery", "stream", 0),
    ("aclrtSetStreamAttribute", "stream", 0, SPACE),
    ("aclrtGetStreamAttribute", "stream", 9, SPACE),
    ("aclrtLaunchHostFunc", "stream", 0, 0),
    ("aclrtLaunchCallback", 0, 0, 0, "stream"),
    ("aclrtLaunchCallback", SPACE, 0, 2, "stream"),
    ("aclrtCreateEventExWithFlag", SPACE, 0),
    ("aclrtCreateEventExWithFlag", SPACE, 0x80),
    ("aclrtCreateEventWithFlag", SPACE, 0x4),
    ("aclrtDestroyEvent", UNKNOWN),
    ("aclrtRecordEvent", UNKNOWN, "stream"),
    ("aclrtRecordEventWithFlag", "event", "stream", 2),
    ("aclrtStreamWaitEventWithFlag", "stream", "event", 0, 2),
    ("aclrtSynchronizeEventWithTimeout", "event", -2),
    ("aclrtValueWrite", "word", 1, 1, "stream"),
    ("aclrtValueWrite", 4096, 1, 0, "stream"),
    ("aclrtLaunchKernel", UNKNOWN, 1, "word", 8, "stream"),
    ("aclrtLaunchKernel", "note", 0, "word", 8, "stream"),
    ("aclrtLaunchKernel", "note", 1, 0, 8, "stream"),
    ("aclrtLaunchKernelWithHostArgs", "note", 1, "stream", 0, 0, 8, 0, 0),
    ("aclrtLaunchKernelWithHostArgs", "note", 1, "stream", 0, SPACE, 8, 0, 1),
    ("aclrtBinaryLoad", UNKNOWN, SPACE),
    ("aclrtBinaryUnLoad", UNKNOWN),
    ("aclrtDestroyBinary", UNKNOWN),
    ("aclrtGetFunctionName", "note", 4, SPACE),
    ("aclrtGetMemInfo", 6, SPACE, SPACE),
    ("aclrtHostRegisterV2", SPACE, 0, 0x10000000),
    ("aclrtHostRegisterV2", SPACE, 64, 0),
    ("aclrtMallocHost", SPACE, 0),
    ("aclrtMalloc", 0, 8, 0),
    ("aclrtMemcpy", "word", 8, SPACE, 0, acl.HOST_TO_DEVICE),
    ("aclrtMemset", "word", 8, 0, 0),
    ("aclrtSetMemcpyDesc", "word", 6, "word", "word", 8, SPACE),
    ("aclrtMemcpyAsyncWithOffset", "word", 8, 0, "word", 9, 0, 6, "stream"),
    ("aclrtMemcpyAsyncWithOffset", SPACE, 8, 0, "word", 8, 0, 6, "stream"),
    ("aclmdlRIExecuteAsync", UNKNOWN, "stream"),
    ("aclmdlRIExecute", UNKNOWN, 0),
    ("aclmdlRIUpdate", UNKNOWN),
    ("aclmdlRIDestroyRegisterCallback", "model", 0, 0),
    ("aclmdlRIExecute", "model", -2),
    ("aclmdlRIDebugJsonPrint", "model", b"/dev/null", 2),
    ("aclmdlRICaptureTaskUpdateBegin", "stream", UNKNOWN),
    ("aclmdlRITaskGetType", UNKNOWN, SPACE),
]


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call[0])
def test_arguments_that_are_refused(ascend, npu, call):
    stream = npu.stream()
    with npu.capture(stream) as models:
        npu.note(stream, 1)
    known = {
        "stream": stream,
        "event": npu.event(),
        "word": npu.words(0),
        "note": npu.note_function,
        "model": models[0],
    }

    def counts():
        objects = [ascend.live(kind) for kind in ("stream", "event", "binary", "registration")]
        return [*objects, ascend.live_bytes, ascend.host_bytes, ascend.argument_bytes]

    before, function = counts(), call[0]
    arguments = [known[part] if isinstance(part, str) else part for part in call[1:]]
    assert ascend.code(function, *arguments) == acl.PARAM_INVALID
    assert function in ascend.recent_text()
    assert counts() == before
    npu.synchronize(stream)
    assert npu.order == []
