"""The simulated driver as a whole: its reports, failures on demand, faults."""

from __future__ import annotations

import ctypes

import pytest

PROC_ADDRESS = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.c_ulonglong,
    ctypes.POINTER(ctypes.c_int),
)


@pytest.fixture
def find(simulator):
    """Return the address of a function by name and version, or None."""
    resolve = PROC_ADDRESS(("cuGetProcAddress_v2", simulator.library))

    def address(name, version):
        function, status = ctypes.c_void_p(), ctypes.c_int(-1)
        code = resolve(name.encode(), ctypes.byref(function), version, 0, ctypes.byref(status))
        assert (code, status.value) in ((0, 0), (500, 1))
        return function.value

    return address


def test_the_library_is_found_by_the_drivers_name(simulator):
    by_name = ctypes.CDLL("libcuda.so.1")
    address = ctypes.cast(by_name.cuGetProcAddress_v2, ctypes.c_void_p).value
    assert address == ctypes.cast(simulator.library.cuGetProcAddress_v2, ctypes.c_void_p).value


def test_the_version_asked_for_decides_the_abi(find):
    assert find("cuStreamGetCaptureInfo", 11030) != find("cuStreamGetCaptureInfo", 12030)
    assert find("cuStreamGetCaptureInfo", 12030) == find("cuStreamGetCaptureInfo", 13000)
    assert find("cuGraphGetEdges", 10000) != find("cuGraphGetEdges", 12030)
    assert find("cuMemAlloc", 2000) is None  # addresses had 32 bits
    assert find("cuMemAlloc", 3020) == find("cuMemAlloc", 13000) is not None
    assert find("cuGraphKernelNodeGetParams", 10000) is None
    assert find("cuNoSuchFunction", 13000) is None


def test_an_older_driver_lacks_newer_functions(find, simulator):
    simulator.set_driver_version(12030)
    assert find("cuFuncGetParamInfo", 12040) is None
    assert find("cuGraphGetEdges", 12030) is not None
    simulator.hide("cuGraphGetEdges")
    assert find("cuGraphGetEdges", 12030) is None
    simulator.reset()
    assert find("cuFuncGetParamInfo", 12040) is not None
    assert find("cuGraphGetEdges", 12030) is not None


def test_device_queries(client, simulator):
    assert client.call("cuDriverGetVersion") == 13000
    assert client.call("cuDeviceGetCount") == 1
    assert int(client.call("cuDeviceGet", 0)) == 0
    assert client.code("cuDeviceGet", 1) == client.INVALID_DEVICE
    assert client.call("cuDeviceGetName", 64, 0).rstrip(b"\0") == b"Simulated device"
    simulator.set_memory_limit(1 << 30)
    assert client.call("cuDeviceTotalMem", 0) == 1 << 30
    attribute = client.driver.CUdevice_attribute
    major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    virtual = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert client.call("cuDeviceGetAttribute", major, 0) == 9
    assert client.call("cuDeviceGetAttribute", virtual, 0) == 1


def test_without_a_device_there_is_nothing_to_initialise(client, simulator):
    simulator.set_device_count(0)
    assert client.code("cuInit", 0) == client.NO_DEVICE
    assert client.code("cuMemAlloc", 64) == client.NOT_INITIALIZED
    simulator.set_device_count(1)
    client.call("cuInit", 0)
    client.call("cuMemFree", client.allocate(64))


def test_errors_have_names(client):
    result = client.driver.CUresult
    for status in (result.CUDA_SUCCESS, result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD):
        assert client.call("cuGetErrorName", status) == status.name.encode()
        assert client.call("cuGetErrorString", status)


def test_a_thread_needs_a_current_context(client):
    def without():
        client.call("cuCtxSetCurrent", 0)
        return client.code("cuMemAlloc", 64), client.code("cuStreamCreate", 0), reserved()

    def reserved():  # needs none
        address = client.call("cuMemAddressReserve", client.GRANULARITY_BYTES, 0, 0, 0)
        return client.code("cuMemAddressFree", address, client.GRANULARITY_BYTES)

    assert client.in_thread(without) == (client.INVALID_CONTEXT, client.INVALID_CONTEXT, client.OK)
    assert int(client.call("cuCtxGetCurrent")) != 0
    assert int(client.call("cuCtxGetDevice")) == 0


def test_a_planned_failure_happens_once_and_does_nothing(client, simulator):
    simulator.fail("cuMemAlloc", client.OUT_OF_MEMORY, nth=2)
    first = client.allocate(64)
    assert client.code("cuMemAlloc", 64) == client.OUT_OF_MEMORY
    assert simulator.live_bytes == 64
    second = client.allocate(32)
    assert (simulator.calls("cuMemAlloc"), simulator.live_bytes) == (3, 96)
    assert first != second


def test_a_failed_kernel_is_a_fault_that_stays(client, simulator):
    def fail(_block):
        raise ValueError("on purpose")

    ran = []
    after = simulator.kernel("after", [], ran.append)
    stream = client.stream()
    client.launch(simulator.kernel("fails", [], fail), stream)
    client.launch(after, stream)
    assert client.code("cuStreamSynchronize", stream) == client.LAUNCH_FAILED
    assert client.code("cuMemAlloc", 64) == client.LAUNCH_FAILED
    assert client.code("cuStreamSynchronize", stream) == client.LAUNCH_FAILED
    assert [str(error) for error in simulator.errors] == ["on purpose"]
    assert ran == []
    simulator.reset()
    client.call("cuMemFree", client.allocate(64))


def test_a_fault_on_demand(client, simulator):
    stream = client.stream()
    simulator.fault()
    assert client.code("cuStreamSynchronize", stream) == client.ILLEGAL_ADDRESS
    assert client.code("cuDeviceGetCount") == client.ILLEGAL_ADDRESS


def test_work_may_not_call_the_driver(client, simulator):
    codes = []
    kernel = simulator.kernel("calls", [], lambda _block: codes.append(client.code("cuMemGetInfo")))
    client.launch(kernel, 0)
    client.call("cuStreamSynchronize", 0)
    assert codes == [client.NOT_PERMITTED]


def test_reset_forgets_everything_but_the_context(client, simulator):
    address, stream = client.allocate(64), client.stream()
    event, graph = client.event(), client.call("cuGraphCreate", 0)
    executable = client.instantiate(graph)
    kernel = simulator.kernel("nothing", [], lambda _block: None)
    kinds = ("stream", "event", "graph", "executable", "kernel", "reservation", "mapping")
    assert [simulator.live(kind) for kind in kinds] == [1, 1, 1, 1, 1, 0, 0]
    simulator.reset()
    assert [simulator.live(kind) for kind in kinds] == [0] * 7
    assert (simulator.live_bytes, simulator.physical_bytes) == (0, 0)
    assert simulator.calls("cuMemAlloc") == 0
    assert client.code("cuMemFree", address) == client.INVALID_VALUE
    assert client.code("cuStreamSynchronize", stream) == client.INVALID_HANDLE
    assert client.code("cuEventQuery", event) == client.INVALID_HANDLE
    assert client.code("cuGraphLaunch", executable, 0) == client.INVALID_VALUE
    assert client.code("cuFuncGetName", kernel) == client.INVALID_HANDLE
    client.call("cuMemFree", client.allocate(64))


def test_reset_is_refused_while_work_runs(client, simulator):
    refused = []

    def reset(_block):
        with pytest.raises(RuntimeError, match="while it executes"):
            simulator.reset()
        refused.append(True)

    client.launch(simulator.kernel("resets", [], reset), 0)
    client.call("cuStreamSynchronize", 0)
    assert refused == [True]


def test_modules_give_kernels_by_name(client, simulator):
    kernel = simulator.kernel("in_a_module", [4], lambda _block: None)
    module = client.call("cuModuleLoadData", b"an image")
    assert int(client.call("cuModuleGetFunction", module, b"in_a_module")) == kernel
    assert client.code("cuModuleGetFunction", module, b"another") == client.NOT_FOUND
    client.call("cuModuleUnload", module)
    assert client.code("cuModuleGetFunction", module, b"in_a_module") == client.INVALID_HANDLE
