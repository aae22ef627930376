"""Device formats, in which memory is not laid out as shape and strides say.

`torch_npu.npu_format_cast` makes them: FRACTAL_NZ, for example, cuts matrices into pieces and pads
these. Only the storage object knows its format, and so do operators that receive a tensor on it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from offload.native import _native

_PLAIN = frozenset(_native.PLAIN_DEVICE_FORMATS)


def own_format(tensor: torch.Tensor) -> str:
    """The name of the format of a tensor's storage; empty if memory is plain."""
    if tensor.device.type != "npu" or isinstance(tensor, FakeTensor):
        return ""
    torch_npu: Any = sys.modules["torch_npu"]  # loaded by whatever made the tensor
    found = torch_npu.get_npu_format(tensor)
    return "" if int(found) in _PLAIN else str(found.name)


def plain_alias(content: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory under another storage object, which has the plain format."""
    alias: torch.Tensor = torch.utils.dlpack.from_dlpack(content)
    return alias
