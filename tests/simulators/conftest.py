"""Fixtures for tests on a simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simulator as simulators
import torch
from graphs import Cuda

from offload import _native


@pytest.fixture
def simulator() -> Iterator[simulators.Simulator]:
    """The simulated CUDA driver, as at its beginning before and after the test."""
    if torch.cuda.is_available():
        pytest.skip("a process holds one CUDA driver, and this one has a real one")
    try:
        loaded = simulators.load()
    except simulators.SimulatorUnavailable as reason:
        pytest.skip(str(reason))
    loaded.reset()
    yield loaded
    loaded.reset()


@pytest.fixture
def cuda(simulator: simulators.Simulator) -> Cuda:
    """The driver's functions, on a thread with the primary context."""
    return Cuda(simulator)


@pytest.fixture
def arena(cuda: Cuda) -> _native.CudaArena:
    """An arena for several residents."""
    return _native.CudaArena(0)
