"""Helpers for weights on simulated devices: devices, failures, expected results, poison."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pytest
import torch
from ascend_simulator import AscendSimulator
from budgets import floor_of
from device_controls import DeviceControls
from simulator import NEWEST_FIRST, OLDEST_FIRST, RANDOM, Simulator
from stored_models import results

import offload
from offload.plan.topology import MemoryLayout

GIVEN = (4, 128)
ORDERS = [(NEWEST_FIRST, 0), (OLDEST_FIRST, 0), (RANDOM, 1), (RANDOM, 2)]


class StreamingDevice(Protocol):
    """A simulated device that copies weights while launches run.

    Attributes:
        backend: found by its name.
        controls: of the simulator.
        orders: the orders in which it can run unordered work, worst cases included.
        execute: the function that executes a program.
        failure: an error's code and message.
        fault: the message of a copy that failed on the device.
        register: the function that registers the host store.
        wait_stream: the function that waits for a stream.
    """

    backend: object
    controls: DeviceControls
    orders: Sequence[object]
    execute: str
    failure: tuple[int, str]
    fault: str
    register: str
    wait_stream: str

    def set_order(self, order: object) -> None:
        """Choose an order for executions from now on."""

    def settle(self, run: offload.Executable) -> None:
        """Wait until the results of the last execution can be read."""

    def enqueue_copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the caller's stream."""

    def synchronize(self) -> None:
        """Run all enqueued work, beginning with the streams that were made."""

    def held(self) -> tuple[int, ...]:
        """The device resources that a load takes and gives back."""


class CudaDevice:
    """The simulated CUDA device."""

    orders = ORDERS
    execute = "cuGraphLaunch"
    failure = (999, "CUDA_ERROR_UNKNOWN")
    fault = "CUDA_ERROR_ILLEGAL_ADDRESS"
    register = "cuMemHostRegister"
    wait_stream = "cuStreamSynchronize"

    def __init__(self, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
        import simulated_backend

        self.controls = simulator
        self.backend = simulated_backend.install(simulator, monkeypatch)

    def set_order(self, order: tuple[int, int]) -> None:
        self.controls.set_node_order(*order)

    def settle(self, run: offload.Executable) -> None:
        """No-op: work runs when it is enqueued."""

    def enqueue_copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        from offload.backends.cuda.graph import call

        call("cuMemcpyAsync", to.data_ptr(), source.data_ptr(), to.nbytes, 0)

    def synchronize(self) -> None:
        from offload.backends.cuda.graph import call

        call("cuCtxSynchronize")

    def held(self) -> tuple[int, ...]:
        kinds = ("executable", "graph", "stream", "event", "mapping", "reservation")
        controls = self.controls
        counts = tuple(controls.live(kind) for kind in kinds)
        return (*counts, controls.host_bytes, controls.physical_bytes)


LAUNCHES_FIRST, COPIES_FIRST, AS_WAITED_FOR = "launches first", "copies first", "as waited for"


class AscendDevice:
    """The simulated Ascend device: streams of a model, one of which goes first."""

    orders = (LAUNCHES_FIRST, COPIES_FIRST, AS_WAITED_FOR)
    execute = "aclmdlRIExecuteAsync"
    failure = (507000, "ACL_ERROR_RT_INTERNAL_ERROR")
    fault = "ACL_ERROR_RT_"
    register = "aclrtMallocHost"
    wait_stream = "aclrtSynchronizeStream"

    def __init__(
        self, ascend: AscendSimulator, monkeypatch: pytest.MonkeyPatch, form: str | None = None
    ) -> None:
        import simulated_ascend
        from ascend_kernels import AtenCapturer

        self.controls = ascend
        made = simulated_ascend.SimulatedAscendBackend(AtenCapturer(ascend), form=form)
        self.backend = simulated_ascend.install(ascend, monkeypatch, made)
        self._order: str | None = None

    def set_order(self, order: str) -> None:
        self._order = order
        self.controls.set_eager(False)
        self.controls.set_first_stream_first(order != COPIES_FIRST)

    def settle(self, run: offload.Executable) -> None:
        if self._order in (LAUNCHES_FIRST, COPIES_FIRST):
            self.synchronize()
        elif self._order == AS_WAITED_FOR:
            run._loaded.resident.finish()

    def enqueue_copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        size_bytes, write = to.nbytes, ctypes.memmove
        addresses = to.data_ptr(), source.data_ptr()
        function = self.controls.host_function(lambda: write(*addresses, size_bytes))
        self.controls.call("aclrtLaunchHostFunc", 0, function, 0)

    def synchronize(self) -> None:
        self.controls.call("aclrtSynchronizeDevice")

    def held(self) -> tuple[int, ...]:
        kinds = ("model", "stream", "event", "host memory")
        controls = self.controls
        counts = tuple(controls.live(kind) for kind in kinds)
        return (*counts, controls.streams_in_use(), controls.host_bytes, controls.live_bytes)


@contextlib.contextmanager
def failing_load(device: StreamingDevice, function: str, nth: int) -> Iterator[None]:
    """Fail the n-th call of a function after a load's preparation; captures also make calls."""
    real = device.backend.prepare

    def prepare(bound):
        found = real(bound)
        device.controls.fail(function, device.failure[0], nth)
        return found

    device.backend.prepare = prepare
    try:
        yield
    finally:
        device.controls.forget_calls()
        device.backend.prepare = real


def floor_on(captured, backend) -> int:
    return floor_of(captured, backend.name)


def unmapped(backend) -> Callable[..., MemoryLayout]:
    """The backend's report on memory in which a weight lies in one piece."""
    real = type(backend.weights).memory_layout
    return lambda self, program: dataclasses.replace(real(self, program), granule_bytes=None)


def expected_of(captured, inputs):
    """Results of the CPU backend with all weights resident; simulated kernels use its operators."""
    with captured.load() as run:
        return [[one.clone() for one in results(run(given))] for given in inputs]


def check(run, inputs, expected, settle=lambda run: None) -> None:
    for given, wanted in zip(inputs, expected, strict=True):
        found = results(run(given))
        settle(run)
        for got, tensor in zip(found, wanted, strict=True):
            assert torch.equal(got, tensor)


def poison_after_last_use(backend, run) -> None:
    """Overwrite each streamed weight when the last launch that reads it has ended."""
    readers = {value: one.index for one in run.program.launches for value in one.reads}
    last = {}
    for piece in run.streaming.plan.pieces:
        if piece.streamed:
            last.setdefault(readers[piece.value], []).append(piece)

    def poison(launch) -> None:
        if run.closed:
            return
        for piece in last.get(launch.index, ()):
            address = run._loaded.weights.tensors[piece.value].data_ptr() + piece.offset_bytes
            ctypes.memset(address, 0xFF, piece.size_bytes)

    backend.capturer.on_end = poison


def on_devices(calls):
    return [(device, *call) for device, its_calls in calls.items() for call in its_calls]


# Calls of a load that can fail, by device: each function, and which of its calls.
LOADS = {
    "cuda": [
        ("cuMemHostRegister", 1), ("cuMemHostRegister", 2), ("cuMemCreate", 1), ("cuMemMap", 1),
        ("cuMemcpyHtoD", 1), ("cuStreamCreate", 1), ("cuEventCreate", 2),
        ("cuGraphAddMemcpyNode", 2), ("cuGraphAddEventRecordNode", 1),
        ("cuGraphAddDependencies", 1),
    ],
    "npu": [
        ("aclrtMallocHost", 1), ("aclrtMallocHost", 2), ("aclrtMalloc", 2),
        ("aclrtMemcpy", 1), ("aclrtCreateStreamWithConfig", 1), ("aclrtCreateStreamWithConfig", 2),
        *(("aclrtCreateEventExWithFlag", nth) for nth in range(1, 6)), ("aclrtMemcpyAsync", 2),
        *(("aclrtCreateEventWithFlag", nth) for nth in range(1, 3)),
        ("aclrtRecordEvent", 1), ("aclrtRecordEvent", 3), ("aclrtStreamWaitEvent", 1),
        ("aclrtStreamWaitEvent", 3), ("aclmdlRICaptureBegin", 1), ("aclmdlRICaptureEnd", 1),
        ("aclrtLaunchKernel", 2),
    ],
}  # fmt: skip
