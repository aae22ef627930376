"""The CUDA backend on the simulated driver, for Programs recorded on the CPU.

Needs cuda-bindings; a module that imports this skips without them.
"""

from __future__ import annotations

import ctypes
import weakref

import pytest
import torch
from aten_capturer import AtenCapturer
from made_up import MadeUpLink, MadeUpTimes
from simulator import Simulator

from offload import backends
from offload.backends.cuda import CudaBackend
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.capture import Capturer
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.streaming import CudaWeights
from offload.plan.topology import CopyCosts


class ProofMemory(DeviceMemory):
    """Also copies from the host, where weights lie."""

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy by the processor: simulated memory is the host's."""
        ctypes.memmove(destination, source, size_bytes)


class SimulatedWeights(MadeUpLink, CudaWeights):
    """Weights over a link that is not measured, so that every run decides the same."""


class SimulatedBackend(CudaBackend):
    """Takes tensors of the CPU: the simulated device's memory is the host's."""

    name = "cuda-simulated"
    alignment_bytes = 16  # of any tensor on the CPU

    def __init__(self, simulator: Simulator, capturer: Capturer | None = None) -> None:
        self.capturer = capturer or AtenCapturer(simulator)
        super().__init__(self.capturer)

    @property
    def weights(self) -> SimulatedWeights:
        """Copied from the host."""
        return SimulatedWeights(self.alignment_bytes)

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

    def copy_costs(self, index: int, resident: object) -> CopyCosts:
        """Not measured, so that every run decides the same: a copy never pays."""
        return CopyCosts(1.0, 1e9, 0.0, 0.0)

    def proof_memory(self, index: int) -> DeviceMemory:
        """Memory of the simulated device and the host."""
        return ProofMemory(index, self.tensor_device(index))


def install(
    simulator: Simulator,
    monkeypatch: pytest.MonkeyPatch,
    backend: SimulatedBackend | None = None,
    *,
    records: bool = False,
) -> SimulatedBackend:
    """Let `load(device="cuda-simulated")` find the backend for the rest of the test.

    Args:
        records: recordings on the CPU are for this backend: they may be opaque, and are compared
            with what the callable does.
    """
    simulator.set_host_is_device(True)
    simulator.set_eager(True)  # tensors of the CPU are read without synchronising
    backend = backend or SimulatedBackend(simulator)
    known = {**backends._BACKENDS, backend.name: lambda: backend}
    if records:
        known["cpu"] = lambda: backend
    monkeypatch.setattr(backends, "_BACKENDS", known)
    # The simulator forgets all memory between tests; a surviving arena would point into it.
    monkeypatch.setattr(cuda_backend, "_arenas", weakref.WeakValueDictionary())
    return backend
