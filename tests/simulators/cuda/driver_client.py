"""NVIDIA's Python bindings as an independent client of the simulated driver, abbreviated."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from cuda.bindings import driver

OK = 0
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 1, 2, 3, 100
INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_STATE = 101, 201, 400, 401
NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_FAILED, NOT_PERMITTED = 500, 600, 700, 719, 800
NOT_SUPPORTED = 801
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED = 900, 901, 902, 903, 904
ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 905, 906, 907, 908

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NON_BLOCKING = 1
MIB = 1 << 20
GRANULARITY_BYTES = 2 * MIB


class DriverError(Exception):
    """A call of the driver failed, with this code."""

    def __init__(self, function: str, code: int):
        super().__init__(f"{function} gave {code}")
        self.code = code


def code(function: str, *arguments: object) -> int:
    """Return the error code of a call."""
    return int(getattr(driver, function)(*arguments)[0])


def call(function: str, *arguments: object) -> object:
    """Return a call's result or tuple of results. DriverError with the code if it fails."""
    status, *results = getattr(driver, function)(*arguments)
    if int(status) != OK:
        raise DriverError(function, int(status))
    return results[0] if len(results) == 1 else tuple(results)


def in_thread(function: Callable[[], object]) -> object:
    """Return the result of `function` on another thread, which has a current context."""
    results: list[object] = []

    def run() -> None:
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 0))
        results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def allocate(n_bytes: int) -> int:
    return int(call("cuMemAlloc", n_bytes))


def upload(address: int, content: bytes) -> None:
    call("cuMemcpyHtoD", address, content, len(content))


def download(address: int, n_bytes: int) -> bytes:
    content = ctypes.create_string_buffer(n_bytes)
    call("cuMemcpyDtoH", ctypes.addressof(content), address, n_bytes)
    return content.raw


def peek(address: int, n_bytes: int) -> bytes:
    """Return the current content of memory, without waiting for any work."""
    return ctypes.string_at(address, n_bytes)


def stream(flags: int = NON_BLOCKING):
    return call("cuStreamCreate", flags)


def event(flags: int = 0):
    return call("cuEventCreate", flags)


def arguments(*pairs: tuple[object, type]) -> tuple[tuple, tuple]:
    """Return kernel parameters as the bindings take them."""
    return tuple(value for value, _ in pairs), tuple(kind for _, kind in pairs)


def launch(kernel: int, on, *pairs: tuple[object, type]) -> None:
    call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, on, arguments(*pairs), 0)


@contextlib.contextmanager
def capture(on, mode: int = THREAD_LOCAL) -> Iterator[list]:
    """Capture the stream; afterwards the list holds the graph."""
    result: list = []
    call("cuStreamBeginCapture", on, driver.CUstreamCaptureMode(mode))
    yield result
    result.append(call("cuStreamEndCapture", on))


def nodes(graph) -> list:
    _, count = call("cuGraphGetNodes", graph)
    return call("cuGraphGetNodes", graph, count)[0] if count else []


def edges(graph) -> list[tuple[int, int]]:
    """Pairs of positions in `nodes`."""
    position = {int(node): index for index, node in enumerate(nodes(graph))}
    *_, count = call("cuGraphGetEdges", graph)
    if not count:
        return []
    begins, ends, _, _ = call("cuGraphGetEdges", graph, count)
    return sorted(
        (position[int(begin)], position[int(end)]) for begin, end in zip(begins, ends, strict=True)
    )


def instantiate(graph):
    return call("cuGraphInstantiate", graph, 0)


def run_graph(executable, on) -> None:
    call("cuGraphLaunch", executable, on)
    call("cuStreamSynchronize", on)


class Arrays:
    """Kernels on int32 arrays, so that results are exact."""

    def __init__(self, simulator):
        self.order: list[str] = []

        def run(block: bytes) -> None:
            source, destination, count, added = (
                int.from_bytes(block[0:8], "little"),
                int.from_bytes(block[8:16], "little"),
                int.from_bytes(block[16:20], "little"),
                int.from_bytes(block[20:24], "little", signed=True),
            )
            inputs = (ctypes.c_int32 * count).from_address(source)
            outputs = (ctypes.c_int32 * count).from_address(destination)
            self.order.append(f"add {added}")
            for index in range(count):
                outputs[index] = inputs[index] + added

        self.add = simulator.kernel("add_number", [8, 8, 4, 4], run)

    def launch_add(self, on, source: int, destination: int, count: int, added: int) -> None:
        """destination[i] = source[i] + added"""
        launch(self.add, on, *self.add_arguments(source, destination, count, added))

    @staticmethod
    def add_arguments(source: int, destination: int, count: int, added: int) -> list:
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        return list(zip((source, destination, count, added), kinds, strict=True))


def ints(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


def reserve_mapped(chunk, n_bytes: int = GRANULARITY_BYTES) -> int:
    """A fresh address range over the chunk, readable and writable."""
    address = int(call("cuMemAddressReserve", n_bytes, 0, 0, 0))
    map_at(address, chunk, n_bytes)
    return address


def map_at(address: int, chunk, n_bytes: int = GRANULARITY_BYTES) -> None:
    call("cuMemMap", address, n_bytes, 0, chunk, 0)
    allow(address, n_bytes)


def allow(address: int, n_bytes: int = GRANULARITY_BYTES, flags: int = 3) -> None:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags(flags)
    call("cuMemSetAccess", address, n_bytes, [access], 1)


def properties():
    result = driver.CUmemAllocationProp()
    result.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    result.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    result.location.id = 0
    return result


def create_chunk(n_bytes: int = GRANULARITY_BYTES):
    return call("cuMemCreate", n_bytes, properties(), 0)


def kernel_params(kernel, pairs, grid=1):
    """Parameters of a kernel node, of (value, ctypes type) for each argument."""
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = driver.CUfunction(kernel)
    params.gridDimX, params.gridDimY, params.gridDimZ = grid, 1, 1
    params.blockDimX = params.blockDimY = params.blockDimZ = 1
    params.kernelParams = arguments(*pairs)
    return params


def line(source, destination, n_bytes, kinds=(2, 2)):
    """Parameters of a memcpy node; kinds as in CUmemorytype: 1 host, 2 device."""
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType, copy.dstMemoryType = map(driver.CUmemorytype, kinds)
    if kinds[0] == 1:
        copy.srcHost = source
    else:
        copy.srcDevice = source
    if kinds[1] == 1:
        copy.dstHost = destination
    else:
        copy.dstDevice = destination
    copy.WidthInBytes, copy.Height, copy.Depth = n_bytes, 1, 1
    return copy


def fill(destination, value, count, element_bytes=4):
    params = driver.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value = destination, value
    params.elementSize, params.width, params.height = element_bytes, count, 1
    return params


def captured_graph(stream, issue):
    with capture(stream) as captured:
        issue()
    return captured[0]
