"""Chains of kernels on either simulated device, and driver controls for tests of streams."""

from __future__ import annotations

import ctypes
from typing import Any

import ascend_residents
import residents
from ascend_client import INTERNAL_ERROR
from ascend_simulator import AscendSimulator
from graphs import Cuda

from offload.native import _native

COUNT = residents.COUNT
RELAXED = 2
CUDA_REFUSED, CUDA_FAULT = 900, 719  # STREAM_CAPTURE_UNSUPPORTED, LAUNCH_FAILED
ASCEND_FAULT = 507015  # AICORE_EXCEPTION

plus = residents.plus


class CudaDevice:
    """The simulated CUDA driver."""

    record, wait, wait_stream = "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize"
    ask = "cuStreamIsCapturing"
    frees = ("cuMemUnmap", "cuGraphExecDestroy", "cuGraphDestroy", "cuMemFreeHost", "cuMemFree")
    refused, fault = CUDA_REFUSED, CUDA_FAULT
    refused_text, fault_text = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA_ERROR_LAUNCH_FAILED"

    def __init__(self, cuda: Cuda, arena: _native.CudaArena) -> None:
        self.cuda, self.arena = cuda, arena
        self.simulator = cuda.simulator

    def chain(self, **fields: Any) -> residents.Chain:
        return residents.Chain(self.cuda, self.arena, **fields)

    def bind_first(self, chain: residents.Chain) -> int:
        """Bind every slot; return the output's address."""
        y = self.allocate([0] * COUNT)
        chain.bind_first(self.allocate(residents.NUMBERS), y)
        return y

    def move(self, chain: residents.Chain, x: int) -> None:
        chain.bind(x=x)

    def allocate(self, numbers: list[int]) -> int:
        return self.cuda.allocate(numbers)

    def stream(self) -> int:
        return self.cuda.stream()

    def begin_capture(self, stream: int) -> None:
        self.cuda("cuStreamBeginCapture", ctypes.c_void_p(stream), RELAXED)

    def end_capture(self, stream: int) -> None:
        """End the capture and destroy its graph."""
        graph = ctypes.c_void_p()
        self.cuda("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self.cuda("cuGraphDestroy", graph)

    def synchronize(self, stream: int) -> None:
        self.cuda.synchronize(stream)

    def live(self) -> dict[str, int]:
        """The number of live objects of each kind."""
        kinds = ("event", "graph", "executable", "reservation", "mapping")
        return {kind: self.simulator.live(kind) for kind in kinds} | {
            "arena": self.arena.size_bytes,
            "host": self.simulator.host_bytes,
        }


class AscendDevice:
    """The simulated Ascend runtime."""

    record, wait = "aclrtRecordEvent", "aclrtSynchronizeEvent"
    wait_stream, ask = "aclrtSynchronizeStream", "aclmdlRICaptureGetInfo"
    frees = ("aclrtFree",)
    refused, fault = INTERNAL_ERROR, ASCEND_FAULT
    refused_text, fault_text = "507000", "507015"

    def __init__(self, ascend: AscendSimulator) -> None:
        self.simulator = ascend

    def chain(self, *, keep: object = None) -> ascend_residents.Chain:
        return ascend_residents.Chain(self.simulator, keep=keep)

    def bind_first(self, chain: ascend_residents.Chain) -> int:
        """Bind every slot; return the output's address."""
        return chain.bind_first()[1]

    def move(self, chain: ascend_residents.Chain, x: int) -> None:
        chain.bind(input=x)

    def allocate(self, numbers: list[int]) -> int:
        address = self.simulator.make("aclrtMalloc", 8 * len(numbers), ascend_residents.HUGE_FIRST)
        (ctypes.c_int64 * len(numbers)).from_address(address)[:] = numbers
        return address

    def stream(self) -> int:
        return self.simulator.make("aclrtCreateStream")

    def begin_capture(self, stream: int) -> None:
        self.simulator.call("aclmdlRICaptureBegin", stream, RELAXED)

    def end_capture(self, stream: int) -> None:
        """End the capture and destroy its model."""
        model = ctypes.c_uint64()
        self.simulator.call("aclmdlRICaptureEnd", stream, ctypes.byref(model))
        self.simulator.call("aclmdlRIDestroy", model.value)

    def synchronize(self, stream: int) -> None:
        self.simulator.call("aclrtSynchronizeStream", stream)

    def live(self) -> dict[str, int]:
        """The number of live objects of each kind, except those that the test allocated."""
        found = ascend_residents.live(self.simulator)
        return {**found, "bytes": 0}


def read(address: int) -> list[int]:
    """Return the current content of memory, whatever work waits."""
    return ascend_residents.read(address)
