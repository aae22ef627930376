"""The backends that the suite runs on, and how a program gets onto one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import offload
from offload.backends import Backend, backend_names, find_backend
from offload.timeline import Scheduling

# A test that a backend cannot pass, with the reason. An unlisted failure is a failure.
UNSUPPORTED: dict[tuple[str, str], str] = {}

Load = Callable[..., offload.Executable]


@pytest.fixture(params=backend_names())
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend; tensors that a test makes are on the device that its Programs are recorded on."""
    reason = UNSUPPORTED.get((request.param, request.node.originalname))
    if reason is not None:
        pytest.skip(reason)
    found = find_backend(request.param)
    try:
        found.machine()
    except offload.BackendUnavailable as error:
        pytest.skip(str(error))
    on_cpu = found.records() == "cpu"
    with contextlib.nullcontext() if on_cpu else torch.device(found.records()):
        yield found


@pytest.fixture(params=list(Scheduling))
def scheduling(request: pytest.FixtureRequest) -> Scheduling:
    return request.param


@pytest.fixture
def load(backend: Backend, scheduling: Scheduling) -> Load:
    """Capture a function on its arguments and load it on the backend."""

    def load_function(function: Callable[..., Any], *args: Any) -> offload.Executable:
        with offload.capture(function) as captured:
            captured(*args)
        return captured.load(device=backend.name, scheduling=scheduling)

    return load_function
