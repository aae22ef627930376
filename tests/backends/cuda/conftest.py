"""What tests of CUDA on the simulated driver share."""

from __future__ import annotations

import pytest
from budgets import weight_bytes


@pytest.fixture
def budget(deep, backend, device_floor) -> int:
    """A budget under which some weights of `deep` have tails that map the same memory."""
    from streamed_tails import share_memory, tails_of

    found = device_floor + (weight_bytes(deep.program) - device_floor) // 2
    with deep.load(backend.name, weights_budget=found, verify=False) as run:
        tails = tails_of(run.streaming.plan)
    assert any(share_memory(one, other) for one in tails for other in tails)
    return found


@pytest.fixture
def device(simulator, monkeypatch):
    """The simulated device, and what loads programs of its kernels."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
    import loading

    return loading.Device(simulator, monkeypatch)
