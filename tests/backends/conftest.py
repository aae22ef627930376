"""Fixtures for tests of a backend on a simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulator as simulators
import torch
from graphs import Cuda
from stored import save_weights, without_memory

import offload
from offload.native import _native


@pytest.fixture
def cuda(simulator: simulators.Simulator) -> Cuda:
    """The driver's functions, on a thread with the primary context."""
    return Cuda(simulator)


@pytest.fixture
def arena(cuda: Cuda) -> _native.CudaArena:
    """An arena for several residents."""
    return _native.CudaArena(0)


@pytest.fixture
def backend(simulator: simulators.Simulator, monkeypatch: pytest.MonkeyPatch):
    """The CUDA backend on the simulated device, found by its name."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
    import simulated_backend

    return simulated_backend.install(simulator, monkeypatch)


@pytest.fixture
def small_granules(simulator: simulators.Simulator) -> None:
    """Map memory in units of 16 KiB: the models' weights have some 100 KiB each."""
    simulator.set_granularity(16 * 1024)


@pytest.fixture
def headed(tmp_path: Path):
    """A model with two heads, captured from files."""
    import shared_stores

    return shared_stores.headed_in(tmp_path)


@pytest.fixture
def deep(tmp_path: Path):
    """A model of many layers, captured from files."""
    from budgets import Deep

    save_weights(Deep().eval(), tmp_path)
    return offload.capture(without_memory(Deep), torch.randn(4, 128), weights=tmp_path)


@pytest.fixture
def device_floor(deep, backend, small_granules) -> int:
    """The least budget of `deep` on the device."""
    import device_streaming

    return device_streaming.floor_on(deep, backend)
