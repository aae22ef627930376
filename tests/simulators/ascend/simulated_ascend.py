"""The Ascend backend on the simulated runtime, for Programs recorded on the CPU."""

from __future__ import annotations

import ctypes
import weakref
from typing import Literal

import ascend_simulator
import pytest
import torch
from ascend_kernels import AtenCapturer
from ascend_simulator import AscendSimulator
from made_up import MadeUpLink, MadeUpTimes

from acl_calls import AclError
from offload import backends
from offload.backends.ascend import AscendBackend, Capturer, Refresh
from offload.backends.ascend.relocated_model import ProofMemory
from offload.backends.ascend.streaming import AscendWeights, WeightMemory
from offload.errors import ExecutionError
from offload.plan.topology import MemoryLayout, MemoryUnit
from offload.program import Program


def device_memory(ascend: AscendSimulator, size_bytes: int) -> WeightMemory:
    """Memory of the simulated device, as a tensor of the CPU."""
    try:
        address = ascend.make("aclrtMalloc", max(1, size_bytes), 0)
    except AclError as error:
        raise ExecutionError(str(error)) from error
    memory = (ctypes.c_uint8 * max(1, size_bytes)).from_address(address)
    release = weakref.finalize(memory, ascend.code, "aclrtFree", address)
    release.atexit = False
    return WeightMemory(torch.frombuffer(memory, dtype=torch.uint8), release)


class SimulatedProofMemory(ProofMemory):
    """Memory of the simulated device; also copies from the host, where weights lie."""

    def __init__(self, ascend: AscendSimulator) -> None:
        super().__init__(0)
        self._ascend = ascend

    def take(self, size_bytes: int) -> torch.Tensor:
        """A tensor of the CPU on memory of the simulated device."""
        return device_memory(self._ascend, size_bytes).tensor

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy by the processor."""
        ctypes.memmove(destination, source, size_bytes)


class SimulatedWeights(MadeUpLink, AscendWeights):
    """Weights in simulated device memory, over a link that is not measured: runs decide alike."""

    def memory_layout(self, program: Program) -> MemoryLayout:
        """The layout of aclrtMalloc."""
        return MemoryLayout(SimulatedAscendBackend.alignment_bytes, unit=MemoryUnit(32, 32))


class SimulatedAscendBackend(AscendBackend):
    """Takes tensors of the CPU: the simulated device's kernels can read the host's memory."""

    name = "npu-simulated"
    alignment_bytes = 16  # of any tensor on the CPU
    tensor_alignment_bytes = 16
    copies_on_device = False  # its copies are strict about where memory lies

    def __init__(
        self,
        capturer: Capturer,
        *,
        refresh: Refresh | str = Refresh.HOST,
        form: Literal["build", "capture"] | None = None,
    ) -> None:
        self.capturer = capturer
        self._ascend = ascend_simulator.load()
        super().__init__(capturer, refresh=refresh, form=form)

    @property
    def weights(self) -> SimulatedWeights:
        """Copied from the host."""
        return SimulatedWeights(self.device_of, self.alignment_bytes)

    @property
    def timing(self) -> MadeUpTimes:
        """No measured durations."""
        return MadeUpTimes()

    def records(self) -> str:
        """Accept Programs recorded on the CPU."""
        return "cpu"

    def tensor_device(self, index: int) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def current_stream(self, index: int) -> int:
        """The default stream."""
        return 0

    def weight_memory(self, index: int, size_bytes: int) -> WeightMemory:
        """Memory of the simulated device."""
        return device_memory(self._ascend, size_bytes)

    def proof_memory(self, index: int) -> ProofMemory:
        """Memory of the simulated device and the host."""
        return SimulatedProofMemory(self._ascend)


def install(
    ascend: AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
    backend: SimulatedAscendBackend | None = None,
) -> SimulatedAscendBackend:
    """Let `load(device="npu-simulated")` find the backend for the rest of the test."""
    ascend.set_eager(True)  # tensors of the CPU are read without synchronising
    found = backend or SimulatedAscendBackend(AtenCapturer(ascend))
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, found.name: lambda: found})
    return found
