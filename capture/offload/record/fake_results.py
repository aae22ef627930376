"""What operators give on a device whose results have other shapes than torch's fake tensors say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_MASK_MULTIPLE_BITS = 128
_BYTE_BITS = 8


def device_rule(func: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """What to call for an operator under fake tensors: its own rule, or that of the device."""
    return _RULES.get((device.type, func), func)


def _native_dropout_of_npu(
    given: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask has one bit for each element, rounded up to 128, in bytes (torch_npu's op-plugin).

    Where nothing or everything is dropped it has the elements of the input instead.
    """
    if train is False or p in (0, 1):
        return torch.empty_like(given), torch.empty_like(given)
    n_bits = math.ceil(given.numel() / _MASK_MULTIPLE_BITS) * _MASK_MULTIPLE_BITS
    mask = torch.empty(n_bits // _BYTE_BITS, dtype=torch.uint8, device=given.device)
    return torch.empty_like(given), mask


_RULES: dict[tuple[str, Any], Callable[..., Any]] = {
    ("npu", torch.ops.aten.native_dropout.default): _native_dropout_of_npu,
}
