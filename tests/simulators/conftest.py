"""Fixtures for tests on a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import simulator as simulators
import torch


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
def cuda(simulator: simulators.Simulator) -> ModuleType:
    """NVIDIA's bindings on the simulated driver: initialised, and with a current context."""
    pytest.importorskip(
        "cuda.bindings.driver", reason="needs cuda-bindings: pip install 'offload[cuda]'"
    )
    import driver_client

    driver_client.call("cuInit", 0)
    driver_client.call("cuCtxSetCurrent", driver_client.call("cuDevicePrimaryCtxRetain", 0))
    simulator.forget_calls()
    return driver_client


@pytest.fixture
def arrays(cuda: ModuleType, simulator: simulators.Simulator):
    """Kernels on arrays of int32, and the order in which they ran."""
    return cuda.Arrays(simulator)
