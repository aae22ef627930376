"""Driver calls that tests make themselves: memory, streams, and graphs by stream capture."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simulator import Simulator

CUDA_VERSION = 13000
GLOBAL, THREAD_LOCAL = 0, 1
SUCCESS = 0


class Graph:
    """A captured graph: its handle and its nodes' handles, in the order of capture."""

    handle: int
    nodes: list[int]


class Cuda:
    """The simulated driver's functions by their names, on a thread with the primary context."""

    def __init__(self, simulator: Simulator):
        self.simulator = simulator
        self._functions: dict[str, Callable[..., int]] = {}
        self("cuInit", 0)
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *args: Any) -> None:
        """Call a function of the driver; a status other than success is an error of the test."""
        if name not in self._functions:
            address, status = ctypes.c_void_p(), ctypes.c_int()
            self.simulator.library.cuGetProcAddress_v2(
                name.encode(),
                ctypes.byref(address),
                CUDA_VERSION,
                ctypes.c_uint64(0),
                ctypes.byref(status),
            )
            assert address.value, name
            self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
        result = self._functions[name](*args)
        assert result == SUCCESS, (name, result)

    def stream(self) -> int:
        handle = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(handle), 1)
        return handle.value

    def synchronize(self, stream: int) -> None:
        self("cuStreamSynchronize", ctypes.c_void_p(stream))

    def allocate(self, numbers: list[int]) -> int:
        """Allocate device memory that holds these numbers, as int64."""
        address = ctypes.c_uint64()
        self("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(max(8, 8 * len(numbers))))
        write(address.value, numbers)
        return address.value

    def free(self, address: int) -> None:
        self("cuMemFree", ctypes.c_uint64(address))

    def launch(self, kernel: int, stream: int, values: list[int], sizes: list[int]) -> None:
        """Launch a kernel whose parameters are these integers of these sizes in bytes."""
        blocks = [
            ctypes.create_string_buffer(value.to_bytes(size, "little"), size)
            for value, size in zip(values, sizes, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(blocks))(*map(ctypes.addressof, blocks))
        dims = [ctypes.c_uint(1)] * 6
        where = (ctypes.c_uint(0), ctypes.c_void_p(stream))
        self("cuLaunchKernel", ctypes.c_void_p(kernel), *dims, *where, pointers, None)

    def copy(self, destination: int, source: int, n_bytes: int, stream: int) -> None:
        where = (ctypes.c_uint64(destination), ctypes.c_uint64(source))
        self("cuMemcpyDtoDAsync", *where, ctypes.c_size_t(n_bytes), ctypes.c_void_p(stream))

    def copy_from_host(self, destination: int, source: int, n_bytes: int, stream: int) -> None:
        where = (ctypes.c_uint64(destination), ctypes.c_void_p(source))
        self("cuMemcpyHtoDAsync", *where, ctypes.c_size_t(n_bytes), ctypes.c_void_p(stream))

    def copy_rows(
        self, destination: int, source: int, width_bytes: int, n_rows: int, stream: int
    ) -> None:
        """Copy rows of this many bytes; the stride at the source is twice as large."""
        device, nothing = 2, [0] * 4
        params = struct.pack(
            "<4QI4x6Q4QI4x6Q3Q",
            *(*nothing, device, 0, source, 0, 0, 2 * width_bytes, 0),
            *(*nothing, device, 0, destination, 0, 0, width_bytes, 0),
            *(width_bytes, n_rows, 1),
        )
        self("cuMemcpy3DAsync", params, ctypes.c_void_p(stream))

    def fill(self, destination: int, value: int, count: int, item_bytes: int, stream: int) -> None:
        number = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 4: ctypes.c_uint}[item_bytes](value)
        name = f"cuMemsetD{8 * item_bytes}Async"
        count_, stream_ = ctypes.c_size_t(count), ctypes.c_void_p(stream)
        self(name, ctypes.c_uint64(destination), number, count_, stream_)

    @contextmanager
    def capture(self, stream: int, mode: int = THREAD_LOCAL) -> Iterator[Graph]:
        """Capture the work that the block enqueues on the stream."""
        graph = Graph()
        self("cuStreamBeginCapture", ctypes.c_void_p(stream), mode)
        yield graph
        handle, count = ctypes.c_void_p(), ctypes.c_size_t()
        self("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(handle))
        self("cuGraphGetNodes", handle, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        self("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
        graph.handle, graph.nodes = handle.value, list(nodes)

    def destroy(self, graph: Graph) -> None:
        self("cuGraphDestroy", ctypes.c_void_p(graph.handle))


def write(address: int, numbers: list[int]) -> None:
    """Write numbers, as int64, at an address of simulated device memory."""
    ctypes.memmove(address, struct.pack(f"<{len(numbers)}q", *numbers), 8 * len(numbers))


def read(address: int, count: int) -> list[int]:
    """Return the int64 numbers at an address of simulated device memory."""
    return list(struct.unpack(f"<{count}q", ctypes.string_at(address, 8 * count)))
