"""The simulated Ascend runtime as a whole: init, errors, devices, contexts, kernels, failures."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import ascend_client as acl
import ascend_simulator
import pytest

UNINITIALISED, REPEAT_INITIALISE, REPEAT_FINALISE = 100001, 100002, 100037


def has_symbol(name: str) -> bool:
    """Return whether dlsym finds the function in the library by the name that clients use."""
    return hasattr(ctypes.CDLL("libascendcl.so"), name)


def test_the_library_is_found_by_its_name(ascend):
    by_name = ctypes.CDLL("libascendcl.so")
    address = ctypes.cast(by_name.aclInit, ctypes.c_void_p).value
    assert address == ctypes.cast(ascend.library.aclInit, ctypes.c_void_p).value


def test_initialisation_counts_references(ascend):
    count = ctypes.c_uint64()
    assert ascend.code("aclInit", 0) == REPEAT_INITIALISE
    ascend.call("aclFinalizeReference", ctypes.byref(count))
    held = count.value  # by the fixture, and by offload where an earlier test opened the runtime
    assert held in (1, 2)
    assert ascend.code("aclInit", b"/no/such/file.json") == 100003
    for _ in range(2):
        assert ascend.code("aclInit", 0) == REPEAT_INITIALISE
    ascend.call("aclFinalizeReference", ctypes.byref(count))
    assert count.value == held + 1
    ascend.call("aclFinalizeReference", 0)
    ascend.call("aclrtSetDevice", 0)
    assert ascend.code("aclInit", 0) == REPEAT_INITIALISE
    ascend.call("aclFinalize")  # at once, whatever the count
    assert ascend.code("aclrtSetDevice", 0) == UNINITIALISED
    assert ascend.code("aclFinalize") == REPEAT_FINALISE
    ascend.call("aclInit", 0)
    assert ascend.code("aclrtSynchronizeDevice") == acl.CONTEXT_NULL  # it is gone
    ascend.call("aclFinalizeReference", ctypes.byref(count))
    assert count.value == 0
    assert ascend.code("aclFinalizeReference", 0) == UNINITIALISED
    ascend.call("aclInit", 0)
    for _ in range(held - 1):
        assert ascend.code("aclInit", 0) == REPEAT_INITIALISE


@pytest.mark.slow
def test_nothing_but_questions_works_before_it_is_initialised(ascend):
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import ascend_simulator
loaded = ascend_simulator.load()
calls = [("aclFinalize",), ("aclrtSetDevice", 0), ("aclFinalizeReference", 0)]
print([loaded.code(*call) for call in calls], loaded.make("aclrtGetDeviceCount"))
"""
    folder = str(Path(ascend_simulator.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[-2] == f"{[UNINITIALISED] * 3} 1"


def test_errors_have_a_text_and_a_code_of_the_thread(ascend):
    assert ascend.recent_text() == ""
    assert ascend.code("aclrtFree", 0) == acl.PARAM_INVALID
    assert ascend.in_thread(ascend.recent_text) == ""
    text = ascend.recent_text()
    assert "aclrtFree" in text
    assert "107000 ACL_ERROR_RT_PARAM_INVALID" in text
    assert ascend.recent_text() == ""
    assert ascend.library.aclrtPeekAtLastError(0) == acl.PARAM_INVALID
    assert ascend.library.aclrtGetLastError(0) == acl.PARAM_INVALID
    assert ascend.library.aclrtGetLastError(0) == 0


def test_the_device_says_what_it_is(ascend):
    name = ascend.library.aclrtGetSocName
    name.restype = ctypes.c_char_p
    assert name() == b"Ascend910B1"
    assert ascend.make("aclrtGetDeviceCount") == 1
    ascend.set_memory_limit(1 << 30)
    value = ctypes.c_int64()
    ascend.call("aclrtGetDeviceInfo", 0, 301, ctypes.byref(value))
    assert value.value == 1 << 30


def test_a_thread_has_no_device_before_it_sets_one(ascend):
    device = ctypes.c_int32(-1)

    def ask():
        return ascend.code("aclrtGetDevice", ctypes.byref(device))

    assert ascend.in_thread(ask, device=None) == acl.CONTEXT_NULL
    assert ascend.in_thread(ask) == 0
    assert device.value == 0
    assert ascend.code("aclrtSetDevice", 1) == 107001
    ascend.set_device_count(2)
    assert ascend.in_thread(ask, device=1) == 0
    assert device.value == 1


def test_a_thread_without_a_context_issues_nothing(ascend, npu):
    stream = npu.stream()

    def issue():
        return npu.launch_host(stream, npu.note_function, 1)

    assert ascend.in_thread(issue, device=None) == acl.CONTEXT_NULL
    assert ascend.in_thread(issue) == 0
    npu.synchronize(stream)
    assert npu.order == ["note 1 of 1"]


def test_contexts_own_their_streams(ascend, npu):
    first, stream = ascend.make("aclrtGetCurrentContext"), npu.stream()
    second = ascend.make("aclrtCreateContext", 0)  # and it is current
    assert ascend.make("aclrtGetCurrentContext") == second
    other = npu.stream()
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.STREAM_CONTEXT
    npu.synchronize(other)
    ascend.call("aclrtDestroyContext", second)
    assert ascend.code("aclrtSynchronizeStream", other) == acl.CONTEXT_NULL
    ascend.call("aclrtSetCurrentContext", first)
    npu.synchronize(stream)
    assert ascend.code("aclrtSetCurrentContext", second) == acl.CONTEXT_NULL
    assert ascend.code("aclrtDestroyContext", first) == acl.PARAM_INVALID
    assert ascend.code("aclrtDestroyContext", second) == acl.CONTEXT_NULL


def test_a_device_that_is_reset_loses_its_streams(ascend, npu):
    stream = npu.stream()
    ascend.call("aclrtSetDevice", 0)
    ascend.call("aclrtResetDevice", 0)  # set twice: it stays set
    npu.synchronize(stream)
    ascend.call("aclrtResetDevice", 0)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.CONTEXT_NULL
    assert ascend.code("aclrtResetDevice", 0) == 107001
    ascend.call("aclrtSetDevice", 0)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.STREAM_CONTEXT
    assert ascend.live("stream") == 0


def test_kernels_read_their_arguments_when_they_run(ascend, npu):
    stream, block = npu.stream(), npu.words(1)
    npu.launch(stream, npu.note_function, block, 8)
    npu.upload(block, acl.u64(2))  # not ordered with the stream
    npu.synchronize(stream)
    assert npu.order == ["note 2 of 1"]


def test_arguments_of_the_host_are_copied_at_the_call(ascend, npu):
    seen = []
    function = ascend.functions({"see": (16, lambda block, _: seen.append(block))})["see"]
    content = (ctypes.c_uint64 * 3)(7, 0, 9)
    holes = (ctypes.c_uint32 * 2)(8, 16)  # word 1 holds the address of word 2
    stream = npu.stream()
    launch = ("aclrtLaunchKernelWithHostArgs", function, 1, stream, 0, content, 24, holes, 1)
    ascend.call(*launch)
    content[0] = 8
    assert (ascend.argument_bytes, ascend.live("argument block")) == (24, 1)
    npu.synchronize(stream)
    first, pointer, last = struct.unpack("<3Q", seen[0])
    assert (first, last, acl.peek(pointer - 16) != (7,)) == (7, 9, True)  # it was freed
    assert (ascend.argument_bytes, ascend.live("argument block")) == (0, 0)
    holes[0] = 20
    code = ascend.code(
        "aclrtLaunchKernelWithHostArgs", function, 1, stream, 0, content, 24, holes, 1
    )
    assert code == acl.PARAM_INVALID


@pytest.mark.parametrize("memory", ["host", "freed"])
def test_arguments_that_the_device_cannot_read_are_a_fault(ascend, npu, memory):
    ascend.set_free_policy(1)
    stream = npu.stream()
    block = npu.pinned(acl.u64(1)) if memory == "host" else npu.words(1)
    npu.launch(stream, npu.note_function, block, 8)
    if memory == "freed":
        ascend.call("aclrtFree", block)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION
    assert npu.order == []


def test_a_failed_kernel_is_a_fault_until_the_device_is_reset(ascend, npu):
    def fail(_block, _n_blocks):
        raise ValueError("on purpose")

    stream, address = npu.stream(), npu.words(1)
    function = ascend.functions({"fails": (0, fail)})["fails"]
    assert npu.launch_host(stream, function, 0) == 0
    npu.note(stream, 1)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION
    assert ascend.code("aclrtSynchronizeDevice") == acl.AICORE_EXCEPTION
    assert npu.launch_host(stream, npu.note_function, 2) == acl.AICORE_EXCEPTION
    assert ascend.code("aclrtMemcpy", address, 8, b"12345678", 8, 1) == acl.AICORE_EXCEPTION
    assert [str(error) for error in ascend.errors] == ["on purpose"]
    ascend.call("aclrtFree", address)  # existing memory can be freed
    assert npu.order == []
    ascend.call("aclrtResetDeviceForce", 0)
    ascend.call("aclrtSetDevice", 0)
    stream = npu.stream()
    npu.note(stream, 3)
    npu.synchronize(stream)
    assert npu.order == ["note 3 of 1"]


def test_binaries_are_checked_and_unloading_is_felt(ascend, npu):
    content = ascend.binary({"one": (8, lambda block, n: None)})
    result, function = ctypes.c_uint64(), ctypes.c_uint64()
    load = ("aclrtBinaryLoadFromData", content)
    assert ascend.code(*load, len(content) - 1, 0, ctypes.byref(result)) == acl.PARAM_INVALID
    bad = b"X" + content[1:]
    assert ascend.code(load[0], bad, len(bad), 0, ctypes.byref(result)) == acl.PARAM_INVALID
    image = ascend.library.aclrtCreateBinary
    image.restype, image.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_size_t]
    made = image(content, len(content))
    ascend.call("aclrtBinaryLoad", made, ctypes.byref(result))
    ascend.call("aclrtDestroyBinary", made)
    get = ("aclrtBinaryGetFunction", result.value)
    assert ascend.code(*get, b"two", ctypes.byref(function)) == 507027
    ascend.call(*get, b"one", ctypes.byref(function))
    name = ctypes.create_string_buffer(8)
    ascend.call("aclrtGetFunctionName", function.value, 8, name)
    assert name.value == b"one"
    stream = npu.stream()
    assert npu.launch_host(stream, function.value) == acl.PARAM_INVALID  # it needs 8 bytes
    assert npu.launch_host(stream, function.value, 1) == 0
    ascend.call("aclrtBinaryUnLoad", result.value)
    assert npu.launch_host(stream, function.value, 1) == acl.PARAM_INVALID
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION


def test_there_is_no_binary_of_nothing(ascend):
    create = ascend.library.aclrtCreateBinary
    create.restype = ctypes.c_void_p
    assert create(None, ctypes.c_size_t(64)) is None
    assert "107000" in ascend.recent_text()
    assert ascend.live("image") == 0


def test_a_binary_can_lie_in_a_file(ascend, npu, tmp_path):
    path, result = tmp_path / "kernels.bin", ctypes.c_uint64()
    load = ("aclrtBinaryLoadFromFile", str(path).encode(), 0, ctypes.byref(result))
    assert ascend.code(*load) == 107009
    path.write_bytes(ascend.binary({"one": (0, lambda block, n: None)}))
    ascend.call(*load)
    assert ascend.live("binary") == 2  # and the client's


def test_a_planned_failure_happens_once_and_does_nothing(ascend, npu):
    ascend.fail("aclrtMalloc", acl.MEMORY_ALLOCATION, nth=2)
    before = ascend.live_bytes
    npu.malloc()
    result = ctypes.c_uint64()
    code = ascend.code("aclrtMalloc", ctypes.byref(result), 64, 0)
    assert code == acl.MEMORY_ALLOCATION
    assert ascend.live_bytes == before + 96
    npu.malloc()
    assert ascend.calls("aclrtMalloc") == 3


def test_calls_that_failed_are_told_until_they_are_forgotten(ascend):
    ascend.code("aclrtFree", 0)
    ascend.in_thread(lambda: ascend.code("aclrtFree", 0))
    assert len(ascend.refusals) == 2
    begin = f"aclrtFree: {acl.PARAM_INVALID} ACL_ERROR_RT_PARAM_INVALID: "
    assert all(one.startswith(begin) for one in ascend.refusals)
    ascend.forget_calls()
    assert ascend.refusals == []


def test_calls_are_traced_in_order(ascend, npu):
    stream, address, source = npu.stream(), npu.malloc(), npu.pinned(bytes(64))
    ascend.start_trace()
    ascend.call("aclrtMemcpyAsync", address, 64, source, 48, acl.HOST_TO_BUFFER_TO_DEVICE, stream)
    npu.note(stream, 1)
    npu.synchronize(stream)
    assert ascend.trace == [
        "aclrtMemcpyAsync kind=5 bytes=48 stream=1",
        "aclrtLaunchKernelWithHostArgs bytes=8 blocks=1 stream=1",
        "aclrtSynchronizeStream",
    ]


def test_work_may_not_call_the_runtime(ascend, npu):
    codes = []
    called = ascend.host_function(lambda: codes.append(ascend.code("aclrtSynchronizeDevice")))
    stream = npu.stream()
    ascend.call("aclrtLaunchHostFunc", stream, called, 0)
    npu.synchronize(stream)
    assert codes == [500000]


def test_hidden_functions_are_not_found(ascend):
    assert has_symbol("aclmdlRIExecute")
    ascend.hide("aclmdlRIExecute")
    assert not has_symbol("aclmdlRIExecute")
    assert has_symbol("aclmdlRIExecuteAsync")
    ascend.reset()
    assert has_symbol("aclmdlRIExecute")
    with pytest.raises(ValueError, match="has no function"):
        ascend.hide("aclNoSuchFunction")


@pytest.mark.parametrize(
    ("version", "present"),
    [
        ("8.1", [True, False, False, False, False]),
        ("8.5", [True, True, False, False, False]),
        ("9.0", [True, True, True, False, False]),
        ("9.1", [True, True, True, True, False]),
        ("", [True, True, True, True, True]),
    ],
)
def test_older_libraries_lack_newer_functions(ascend, version, present):
    names = [
        "aclmdlRICaptureBegin",
        "aclmdlRICaptureThreadExchangeMode",
        "aclmdlRIDestroyRegisterCallback",
        "aclmdlRIGetId",
        "aclrtRecordEventWithFlag",
    ]
    ascend.set_personality(version)
    assert [has_symbol(name) for name in names] == present


def test_reset_forgets_everything_but_the_device(ascend, npu):
    npu.malloc()
    npu.pinned(b"12345678")
    stream, event = npu.stream(), npu.event()
    with npu.capture(stream):
        npu.note(stream, 1)
    kinds = ("stream", "model stream", "event", "model", "task", "argument block", "binary")
    assert [ascend.live(kind) for kind in kinds] == [1, 1, 1, 1, 1, 1, 1]
    ascend.reset()
    assert [ascend.live(kind) for kind in kinds] == [0] * 7
    assert (ascend.live_bytes, ascend.host_bytes, ascend.argument_bytes) == (0, 0, 0)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.STREAM_CONTEXT
    assert ascend.code("aclrtDestroyEvent", event) == acl.PARAM_INVALID
    ascend.call("aclrtSynchronizeStream", 0)


def test_each_thread_has_its_last_error(ascend):
    ascend.code("aclrtFree", 0)
    assert ascend.in_thread(lambda: ascend.library.aclrtGetLastError(0)) == 0
    assert ascend.library.aclrtGetLastError(0) == acl.PARAM_INVALID


def test_versions_modes_and_peers(ascend):
    numbers, mode = [ctypes.c_int32() for _ in range(3)], ctypes.c_int()
    ascend.call("aclrtGetVersion", *(ctypes.byref(number) for number in numbers))
    assert [number.value for number in numbers] == [1, 17, 0]
    ascend.call("aclrtGetRunMode", ctypes.byref(mode))
    assert mode.value == 1  # on the host
    ascend.set_device_count(2)
    can = ctypes.c_int32()
    for device, expected in ((0, 0), (1, 1)):
        ascend.call("aclrtDeviceCanAccessPeer", ctypes.byref(can), device, 0)
        assert can.value == expected


def test_other_contexts_are_waited_for_while_one_captures(ascend, npu):
    first, capturing = ascend.make("aclrtGetCurrentContext"), npu.stream()
    npu.begin(capturing, acl.GLOBAL)
    other = ascend.make("aclrtCreateContext", 0)
    npu.note(0, 1)
    ascend.call("aclrtSynchronizeDevice")
    assert npu.order == ["note 1 of 1"]
    npu.upload(npu.malloc(), acl.u64(1))  # it waits, which the other context's mode forbids
    ascend.call("aclrtDestroyContext", other)
    ascend.call("aclrtSetCurrentContext", first)
    npu.end(capturing)


def test_reset_puts_settings_back(ascend, npu):
    ascend.set_stream_limit(1)
    ascend.set_software_sq(False)
    ascend.reset()
    stream = npu.stream()
    npu.begin(stream)
    assert ascend.streams_in_use() == 2
