"""Executables on the simulated runtime whose header is timed: their kernels are no-ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ascend_simulator
import npu_device
import pytest
import torch
from ascend_kernels import AtenCapturer
from aten_kernel import AtenKernel
from simulated_ascend import SimulatedAscendBackend, install

import offload

REFRESHES = ("host", "gather", "gather by operators")


def executable(
    ascend: ascend_simulator.AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
    refresh: str,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
) -> offload.Executable:
    """The function, loaded with one of `REFRESHES`, so that an execution is short."""
    monkeypatch.setattr(AtenKernel, "execute", lambda self, block: None)
    if refresh == "gather by operators":
        npu_device.operators().sim_operators_reset()
    capturer = AtenCapturer(ascend, has_gather=refresh == "gather")
    backend = SimulatedAscendBackend(capturer, refresh="host" if refresh == "host" else "gather")
    install(ascend, monkeypatch, backend)
    return offload.capture(function, *inputs).load(backend.name)
