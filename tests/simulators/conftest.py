"""Fixtures for tests on a simulated device."""

from __future__ import annotations

from types import ModuleType

import pytest
import simulator as simulators


@pytest.fixture
def client(simulator: simulators.Simulator) -> ModuleType:
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
def arrays(client: ModuleType, simulator: simulators.Simulator):
    """Kernels on arrays of int32, and the order in which they ran."""
    return client.Arrays(simulator)
