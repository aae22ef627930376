"""Tensors in a format of the device's own, as `torch_npu.npu_format_cast` makes them.

Their storage is larger than their shape says and ordered otherwise, and which format it has only
the storage object knows. To watch, copy or compare the bytes of one, as a recording does, is to
take it for plain: torch_npu then converts it, or refuses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from offload.errors import CaptureError
from offload.record.operators import user_location

# torch_npu's names of formats in which memory is as shape and strides say (its FormatHelper).
_PLAIN = frozenset({"UNDEFINED", "NCHW", "NHWC", "ND", "NCL", "NCDHW", "NDHWC"})


def refuse_own_format(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that lies in a format of the device's own.

    Args:
        tensor: on any device.
        what: it is, to begin the message with.

    Raises:
        CaptureError: it does; the message names the format.
    """
    if tensor.device.type != "npu" or isinstance(tensor, FakeTensor):
        return
    torch_npu: Any = sys.modules["torch_npu"]  # whoever made the tensor has loaded it
    name = str(torch_npu.get_npu_format(tensor).name)
    if name not in _PLAIN:
        size_bytes = tensor.untyped_storage().nbytes()
        raise CaptureError(
            f"{user_location()}: {what} lies in the device's format {name}, {size_bytes} bytes for "
            f"shape {list(tensor.shape)}, which cannot be watched and compared as bytes: "
            "cast it with torch_npu.npu_format_cast(tensor, 2) before the capture"
        )
