"""Arguments that the simulated Ascend runtime refuses: null, out of range, or unknown objects."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

from model_tasks import tasks_of

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
    ("aclrtCreateEventExWithFlag", SPACE, 0x10),
    ("aclrtCreateEventExWithFlag", SPACE, acl.EVENT_EXTERNAL),
    ("aclrtCreateEventExWithFlag", SPACE, acl.EVENT_EXTERNAL | acl.EVENT_SYNC),
    ("aclrtCreateEventWithFlag", SPACE, acl.EVENT_EXTERNAL | acl.EVENT_SYNC),
    ("aclrtCreateEventWithFlag", SPACE, 0x40),
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
    ("aclrtMemcpyAsyncWithOffset", "word", 16, 9, "word", 8, 0, 6, "stream"),
    ("aclrtMemcpyAsyncWithOffset", "word", 8, 0, "word", 8, 1 << 48, 6, "stream"),
    ("aclrtMemcpyAsyncWithOffset", "word", 8, 0, "word", 8, 0, acl.DEVICE_TO_DEVICE, "stream"),
    ("aclrtMemcpyAsyncWithOffset", "word", 1 << 33, 0, "word", (4 << 30) + 1, 0, 6, "stream"),
    ("aclrtMemcpyAsyncWithOffset", SPACE, 8, 0, "word", 8, 0, 6, "stream"),
    ("aclmdlRIExecuteAsync", UNKNOWN, "stream"),
    ("aclmdlRIExecute", UNKNOWN, 0),
    ("aclmdlRIUpdate", UNKNOWN),
    ("aclmdlRIDestroyRegisterCallback", "model", 0, 0),
    ("aclmdlRIExecute", "model", -2),
    ("aclmdlRIDebugJsonPrint", "model", b"/dev/null", 2),
    ("aclmdlRICaptureTaskUpdateBegin", "stream", UNKNOWN),
    ("aclmdlRITaskGetType", UNKNOWN, SPACE),
    ("aclrtMemset", SPACE, 8, 0, 8),
    ("aclrtMemsetAsync", SPACE, 8, 0, 8, "stream"),
    ("aclrtMemsetAsync", "block", 8, 0, 16, "stream"),
    ("aclrtMemcpyAsync", "word", 8, SPACE, 0, acl.HOST_TO_BUFFER_TO_DEVICE, "stream"),
    ("aclrtMemcpyAsync", "word", 8, "other word", 8, acl.HOST_TO_BUFFER_TO_DEVICE, "stream"),
    ("aclrtSetMemcpyDesc", SPACE, 6, "word", "other word", 8, 0),
    ("aclrtSetMemcpyDesc", "block", 6, SPACE, "word", 8, 0),
    ("aclrtSetMemcpyDesc", "block", 6, "word", SPACE, 8, 0),
    ("aclrtMemcpyAsyncWithDesc", SPACE, 6, "stream"),
    ("aclrtMemcpyAsyncWithOffset", "word", 8, 0, SPACE, 8, 0, 6, "stream"),
    ("aclrtGetDeviceInfo", 0, 9999, SPACE),
    ("aclmdlRIBuildBegin", SPACE, 1),
    ("aclmdlRICaptureThreadExchangeMode", (ctypes.c_int * 1)(3)),
]

# The same with a null pointer for an input or output.
NULL = [
    ("aclrtGetVersion", 0, SPACE, SPACE),
    ("aclrtGetVersion", SPACE, 0, SPACE),
    ("aclrtGetVersion", SPACE, SPACE, 0),
    ("aclrtGetRunMode", 0),
    ("aclrtGetDeviceCount", 0),
    ("aclrtGetDevice", 0),
    ("aclrtGetDeviceInfo", 0, 1, 0),
    ("aclrtDeviceCanAccessPeer", 0, 0, 0),
    ("aclrtCreateContext", 0, 0),
    ("aclrtGetCurrentContext", 0),
    ("aclrtCtxGetCurrentDefaultStream", 0),
    ("aclrtCreateEvent", 0),
    ("aclrtQueryEventStatus", "event", 0),
    ("aclrtQueryEvent", "event", 0),
    ("aclrtQueryEventWaitStatus", "event", 0),
    ("aclrtEventElapsedTime", 0, "timed", "timed"),
    ("aclrtEventGetTimestamp", "timed", 0),
    ("aclrtGetEventId", "event", 0),
    ("aclrtBinaryLoadFromData", 0, 64, 0, SPACE),
    ("aclrtBinaryLoadFromData", "binary", 16, 0, 0),
    ("aclrtBinaryLoadFromFile", 0, 0, SPACE),
    ("aclrtBinaryGetFunction", "loaded", 0, SPACE),
    ("aclrtBinaryGetFunction", "loaded", b"note", 0),
    ("aclrtGetFunctionName", "note", 64, 0),
    ("aclrtGetMemcpyDescSize", 6, 0),
    ("aclrtMemcpy", 0, 8, SPACE, 8, acl.HOST_TO_HOST),
    ("aclrtMemcpy", SPACE, 8, 0, 8, acl.HOST_TO_HOST),
    ("aclrtMallocHost", 0, 64),
    ("aclrtMallocHostWithCfg", 0, 64, 0),
    ("aclrtHostRegister", SPACE, 64, 0, 0),
    ("aclrtHostRegisterV2", 0, 64, 0x10000000),
    ("aclrtGetMemInfo", 1, 0, SPACE),
    ("aclrtGetMemInfo", 1, SPACE, 0),
    ("aclrtPointerGetAttributes", "word", 0),
    ("aclrtCreateStream", 0),
    ("aclrtStreamGetId", "stream", 0),
    ("aclrtStreamGetPriority", "stream", 0),
    ("aclrtStreamGetFlags", "stream", 0),
    ("aclrtGetStreamAvailableNum", 0),
    ("aclrtSetStreamAttribute", "stream", 1, 0),
    ("aclrtGetStreamAttribute", "stream", 1, 0),
    ("aclmdlRIGetStreams", "model", SPACE, 0),
    ("aclmdlRITaskGetType", "task", 0),
    ("aclmdlRITaskGetSeqId", "task", 0),
    ("aclmdlRITaskGetParams", "task", 0),
    ("aclmdlRITaskSetParams", "task", 0),
    ("aclmdlRIKernelTaskGetAttribute", "task", 1, 0),
    ("aclmdlRIBuildBegin", 0, 0),
    ("aclmdlRISetName", "model", 0),
    ("aclmdlRIGetName", "model", 64, 0),
    ("aclmdlRIGetId", "model", 0),
    ("aclmdlRIDebugJsonPrint", "model", 0, 0),
    ("aclmdlRIBindStream", "model", 0, 0),
    ("aclmdlRICaptureEnd", "stream", 0),
    ("aclmdlRICaptureGetInfo", "stream", 0, 0),
    ("aclmdlRICaptureThreadExchangeMode", 0),
    ("aclmdlRICaptureTaskGrpEnd", "stream", 0),
]

# The same with another error code.
WITH_CODES = [
    (acl.INVALID_DEVICE, "aclrtSetDevice", 9),
    (acl.INVALID_DEVICE, "aclrtSetDevice", -1),
    (acl.INVALID_DEVICE, "aclrtResetDevice", 9),
    (acl.INVALID_DEVICE, "aclrtResetDeviceForce", 9),
    (acl.INVALID_DEVICE, "aclrtGetDeviceInfo", 9, 1, SPACE),
    (acl.INVALID_DEVICE, "aclrtDeviceCanAccessPeer", SPACE, 9, 0),
    (acl.INVALID_DEVICE, "aclrtDeviceCanAccessPeer", SPACE, 0, 9),
    (acl.INVALID_DEVICE, "aclrtCreateContext", SPACE, 9),
    (acl.FEATURE_NOT_SUPPORT, "aclrtGetMemcpyDescSize", 3, SPACE),
    (acl.FEATURE_NOT_SUPPORT, "aclrtSetMemcpyDesc", "block", 3, "word", "other word", 8, 0),
    (acl.FEATURE_NOT_SUPPORT, "aclrtMemcpyAsyncWithDesc", "descriptor", 3, "stream"),
    (acl.FEATURE_NOT_SUPPORT, "aclrtHostRegister", SPACE, 64, 1, SPACE),
    (acl.MEMORY_ALLOCATION, "aclrtMalloc", SPACE, 2**64 - 8, 0),
    (100000, "aclGetDeviceCapability", 0, 3, SPACE),
    (100003, "aclInit", b"/nowhere/at/all.json"),
]


@pytest.mark.parametrize(
    "call",
    [*((acl.PARAM_INVALID, *call) for call in [*REFUSED, *NULL]), *WITH_CODES],
    ids=lambda call: call[1],
)
def test_arguments_that_are_refused(ascend, npu, call):
    stream = npu.stream()
    with npu.capture(stream) as models:
        npu.note(stream, 1)
    content, loaded = ascend.binary({}), ctypes.c_uint64()
    ascend.call("aclrtBinaryLoadFromData", content, len(content), 0, ctypes.byref(loaded))
    known = {
        "stream": stream,
        "event": npu.event(),
        "timed": npu.event(acl.EVENT_TIME_LINE),
        "word": npu.words(0),
        "other word": npu.words(0),
        "block": npu.malloc(64),
        "descriptor": npu.malloc(64),
        "note": npu.note_function,
        "binary": content,
        "loaded": loaded.value,
        "model": models[0],
        "task": tasks_of(ascend, models[0])[0][0],
    }
    ascend.call("aclrtSetMemcpyDesc", known["descriptor"], 6, known["word"], known["block"], 8, 0)
    npu.record(known["timed"], stream)
    npu.synchronize(stream)
    npu.order.clear()

    def counts():
        objects = [ascend.live(kind) for kind in ("stream", "event", "binary", "registration")]
        return [*objects, ascend.live_bytes, ascend.host_bytes, ascend.argument_bytes]

    before, (code, function, *given) = counts(), call
    arguments = [known[part] if isinstance(part, str) else part for part in given]
    assert ascend.code(function, *arguments) == code
    assert function in ascend.recent_text()
    assert counts() == before
    npu.synchronize(stream)
    assert npu.order == []
