"""The simulated driver as a whole: what it says of itself, failures on demand, faults."""

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
    """The address of a function by name and version, or None."""
    resolve = PROC_ADDRESS(("cuGetProcAddress_v2", simulator.library))

    def address(name, version):
        function, status = ctypes.c_void_p(), ctypes.c_int(-1)
        code = resolve(name.encode(), ctypes.byref(function), version, 0, ctypes.byref(status))
        assert (code, status.value) in ((0, 0), (500, 1))
        return function.value

    return address


def test_the_library_is_found_by_the_drivers_name(simulator):
    by_name = ctypes.CDLL("libcuda.so.1")
    simulator.library.cuGetProcAddress_v2.restype = None
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


def test_device_queries(cuda, simulator):
    assert cuda.call("cuDriverGetVersion") == 13000
    assert cuda.call("cuDeviceGetCount") == 1
    assert int(cuda.call("cuDeviceGet", 0)) == 0
    assert cuda.code("cuDeviceGet", 1) == cuda.INVALID_DEVICE
    assert cuda.call("cuDeviceGetName", 64, 0).rstrip(b"\0") == b"Simulated device"
    simulator.set_memory_limit(1 << 30)
    assert cuda.call("cuDeviceTotalMem", 0) == 1 << 30
    attribute = cuda.driver.CUdevice_attribute
    major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    virtual = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert cuda.call("cuDeviceGetAttribute", major, 0) == 9
    assert cuda.call("cuDeviceGetAttribute", virtual, 0) == 1


def test_without_a_device_there_is_nothing_to_initialise(cuda, simulator):
    simulator.set_device_count(0)
    assert cuda.code("cuInit", 0) == cuda.NO_DEVICE
    assert cuda.code("cuMemAlloc", 64) == cuda.NOT_INITIALIZED
    simulator.set_device_count(1)
    cuda.call("cuInit", 0)
    cuda.call("cuMemFree", cuda.allocate(64))


def test_errors_have_names(cuda):
    result = cuda.driver.CUresult
    for status in (result.CUDA_SUCCESS, result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD):
        assert cuda.call("cuGetErrorName", status) == status.name.encode()
        assert cuda.call("cuGetErrorString", status)


def test_a_thread_needs_a_current_context(cuda):
    def without():
        cuda.call("cuCtxSetCurrent", 0)
        return cuda.code("cuMemAlloc", 64), cuda.code("cuStreamCreate", 0), reserved()

    def reserved():  # needs none
        address = cuda.call("cuMemAddressReserve", cuda.GRANULARITY_BYTES, 0, 0, 0)
        return cuda.code("cuMemAddressFree", address, cuda.GRANULARITY_BYTES)

    assert cuda.in_thread(without) == (cuda.INVALID_CONTEXT, cuda.INVALID_CONTEXT, cuda.OK)
    assert int(cuda.call("cuCtxGetCurrent")) != 0
    assert int(cuda.call("cuCtxGetDevice")) == 0


def test_a_planned_failure_happens_once_and_does_nothing(cuda, simulator):
    simulator.fail("cuMemAlloc", cuda.OUT_OF_MEMORY, nth=2)
    first = cuda.allocate(64)
    assert cuda.code("cuMemAlloc", 64) == cuda.OUT_OF_MEMORY
    assert simulator.live_bytes == 64
    second = cuda.allocate(32)
    assert (simulator.calls("cuMemAlloc"), simulator.live_bytes) == (3, 96)
    assert first != second


def test_a_failed_kernel_is_a_fault_that_stays(cuda, simulator):
    def fail(_block):
        raise ValueError("on purpose")

    ran = []
    after = simulator.kernel("after", [], lambda block: ran.append(block))
    stream = cuda.stream()
    cuda.launch(simulator.kernel("fails", [], fail), stream)
    cuda.launch(after, stream)
    assert cuda.code("cuStreamSynchronize", stream) == cuda.LAUNCH_FAILED
    assert cuda.code("cuMemAlloc", 64) == cuda.LAUNCH_FAILED
    assert cuda.code("cuStreamSynchronize", stream) == cuda.LAUNCH_FAILED
    assert [str(error) for error in simulator.errors] == ["on purpose"]
    assert ran == []
    simulator.reset()
    cuda.call("cuMemFree", cuda.allocate(64))


def test_a_fault_on_demand(cuda, simulator):
    stream = cuda.stream()
    simulator.fault()
    assert cuda.code("cuStreamSynchronize", stream) == cuda.ILLEGAL_ADDRESS
    assert cuda.code("cuDeviceGetCount") == cuda.ILLEGAL_ADDRESS


def test_work_may_not_call_the_driver(cuda, simulator):
    codes = []
    kernel = simulator.kernel("calls", [], lambda _block: codes.append(cuda.code("cuMemGetInfo")))
    cuda.launch(kernel, 0)
    cuda.call("cuStreamSynchronize", 0)
    assert codes == [cuda.NOT_PERMITTED]


def test_reset_forgets_everything_but_the_context(cuda, simulator):
    address, stream = cuda.allocate(64), cuda.stream()
    event, graph = cuda.event(), cuda.call("cuGraphCreate", 0)
    executable = cuda.instantiate(graph)
    kernel = simulator.kernel("nothing", [], lambda _block: None)
    kinds = ("stream", "event", "graph", "executable", "kernel", "reservation", "mapping")
    assert [simulator.live(kind) for kind in kinds] == [1, 1, 1, 1, 1, 0, 0]
    simulator.reset()
    assert [simulator.live(kind) for kind in kinds] == [0] * 7
    assert (simulator.live_bytes, simulator.physical_bytes) == (0, 0)
    assert simulator.calls("cuMemAlloc") == 0
    assert cuda.code("cuMemFree", address) == cuda.INVALID_VALUE
    assert cuda.code("cuStreamSynchronize", stream) == cuda.INVALID_HANDLE
    assert cuda.code("cuEventQuery", event) == cuda.INVALID_HANDLE
    assert cuda.code("cuGraphLaunch", executable, 0) == cuda.INVALID_VALUE
    assert cuda.code("cuFuncGetName", kernel) == cuda.INVALID_HANDLE
    cuda.call("cuMemFree", cuda.allocate(64))


def test_reset_is_refused_while_work_runs(cuda, simulator):
    refused = []

    def reset(_block):
        with pytest.raises(RuntimeError, match="while it executes"):
            simulator.reset()
        refused.append(True)

    cuda.launch(simulator.kernel("resets", [], reset), 0)
    cuda.call("cuStreamSynchronize", 0)
    assert refused == [True]


def test_modules_give_kernels_by_name(cuda, simulator):
    kernel = simulator.kernel("in_a_module", [4], lambda _block: None)
    module = cuda.call("cuModuleLoadData", b"an image")
    assert int(cuda.call("cuModuleGetFunction", module, b"in_a_module")) == kernel
    assert cuda.code("cuModuleGetFunction", module, b"another") == cuda.NOT_FOUND
    cuda.call("cuModuleUnload", module)
    assert cuda.code("cuModuleGetFunction", module, b"in_a_module") == cuda.INVALID_HANDLE
