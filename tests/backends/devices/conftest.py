"""Fixtures for tests of each simulated device that streams weights."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cuda", "npu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Each simulated device that streams weights."""
    import device_streaming

    if request.param != "cuda":
        ascend = request.getfixturevalue("ascend")
        return device_streaming.AscendDevice(ascend, monkeypatch)
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
    request.getfixturevalue("small_granules")
    return device_streaming.CudaDevice(request.getfixturevalue("simulator"), monkeypatch)


@pytest.fixture
def least_budget(deep, device) -> int:
    """The least budget of `deep` on the device."""
    import device_streaming

    return device_streaming.floor_on(deep, device.backend)


@pytest.fixture
def headed_budget(headed, device) -> int:
    """The least budget of `headed` on the device."""
    import device_streaming

    return device_streaming.floor_on(headed, device.backend)


@pytest.fixture
def pinned(device, headed):
    """Counts the bytes pinned since `headed` was captured."""
    import shared_stores

    return shared_stores.pinned_since(device)
