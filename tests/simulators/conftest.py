"""Fixtures for tests on a simulated device."""

from __future__ import annotations

from collections.abc import Iterator

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
