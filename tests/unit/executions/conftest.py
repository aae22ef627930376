"""What tests of tasks and executions share."""

from __future__ import annotations

import threading

import pytest
import torch

import offload


@pytest.fixture(scope="module")
def captured() -> offload.Captured:
    return offload.capture(lambda x: x + 1, torch.zeros(4))


@pytest.fixture
def run(captured: offload.Captured):
    with captured.load() as run:
        yield run


@pytest.fixture
def gate():
    """An event that callables wait for."""
    opened = threading.Event()
    yield opened
    opened.set()
