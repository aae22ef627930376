"""Formats of a device's own, in which memory is not as shape and strides say.

`torch_npu.npu_format_cast` makes them: FRACTAL_NZ, for one, cuts matrices into pieces and pads
these. Which format it has only the storage object knows, and whoever makes a tensor on it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from offload.native import _native

_PLAIN = frozenset(_native.PLAIN_DEVICE_FORMATS)


def own_format(tensor: torch.Tensor) -> str:
    """The name of the format that a tensor's storage has; empty where memory is plain."""
    if tensor.device.type != "npu" or isinstance(tensor, FakeTensor):
        return ""
    torch_npu: Any = sys.modules["torch_npu"]  # whoever made the tensor has loaded it
    found = torch_npu.get_npu_format(tensor)
    return "" if int(found) in _PLAIN else str(found.name)


def plain_alias(content: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory under a storage object of its own, to which it is plain."""
    alias: torch.Tensor = torch.utils.dlpack.from_dlpack(content)
    return alias
