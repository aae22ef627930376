"""Fixtures for tests of the simulators."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import ascend_client
import pytest
import simulator as simulators
from operator_client import Operators


@pytest.fixture
def arrays(client: ModuleType, simulator: simulators.Simulator):
    """Kernels on arrays of int32, and the order in which they ran."""
    return client.Arrays(simulator)


@pytest.fixture
def stream(client: ModuleType):
    """A stream of the device."""
    return client.stream()


@pytest.fixture
def data(client: ModuleType) -> int:
    """Device memory that holds the int32 numbers from 0 to 15."""
    address = client.allocate(64)
    client.upload(address, client.ints(*range(16)))
    return address


@pytest.fixture
def operators(npu: ascend_client.Client) -> Iterator[Operators]:
    """The simulated operator libraries."""
    client = Operators(npu)
    yield client
    client.close()
