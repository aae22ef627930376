"""What tests with torch_npu share: comparing with the CPU, and capturing.

Every module of tests imports it, and is skipped where torch_npu is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import npu_device
import pytest
import torch

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("torch_npu is not in this environment: make test-npu-sim", allow_module_level=True)

# Largest difference from the CPU: the simulator sums in double precision, the CPU does not. A
# device has algorithms of its own; a stale or mixed-up address gives other values altogether.
SIMULATED_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DEVICE_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def to_npu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the device in the same layout of dimensions and strides."""
    copies = []
    for tensor in tensors:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
        copies.append(copy.copy_(tensor))
    return copies


def check_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """That a result of the device is the CPU's: its values, shape and type."""
    if tolerance is None:
        tolerance = SIMULATED_TOLERANCES.get(expected.dtype, 0)
    if npu_device.uses_installed():
        tolerance = max(tolerance, DEVICE_TOLERANCES.get(expected.dtype, 0))
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def capture(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, Any]:
    """The graph of one call on these inputs, and its result, after a call to warm up."""
    function(*inputs)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function(*inputs)
    return graph, result
