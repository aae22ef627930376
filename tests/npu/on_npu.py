"""Helpers of tests with torch_npu: comparison with the CPU, and capturing.

Every test module imports it, and is skipped where torch_npu is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator

import offload

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("torch_npu is not in this environment: make test-npu-sim", allow_module_level=True)

# Largest difference from the CPU: the simulator sums in double precision, the CPU does not. A
# device has other algorithms; a stale or mixed-up address gives other values altogether.
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
    """Check that a device's result equals the CPU's in values, shape and type."""
    if tolerance is None:
        tolerance = SIMULATED_TOLERANCES.get(expected.dtype, 0)
    if npu_device.uses_installed():
        tolerance = max(tolerance, DEVICE_TOLERANCES.get(expected.dtype, 0))
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def capture(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, Any]:
    """Return the graph of one call on these inputs, and its result, after a warm-up call."""
    function(*inputs)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function(*inputs)
    return graph, result


def fail_each_call(
    simulator: AscendSimulator,
    function: str,
    load: Callable[[], object],
    check: Callable[[str], object],
) -> None:
    """Load with the first call of a function failing, then the second, until no call is left.

    Args:
        simulator: the simulated runtime.
        function: a runtime function that every load calls; it fails with 507000.
        load: loads and closes.
        check: asserts that nothing is left; its argument describes the call.
    """
    n_failed = 0
    for nth in range(1, 200):
        simulator.forget_calls()
        simulator.fail(function, 507000, nth)
        try:
            load()
        except offload.OffloadError:
            n_failed += 1
        is_reached = simulator.calls(function) >= nth
        simulator.forget_calls()
        check(f"call {nth} of {function}")
        if not is_reached:
            assert n_failed
            return
    pytest.fail(f"{function} was called at every try")
