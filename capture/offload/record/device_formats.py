"""Refuses tensors in a device-specific format where plain memory is required."""

from __future__ import annotations

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.interpreter.device_formats import own_format
from offload.program import Value


def refuse_own_format(tensor: torch.Tensor, what: str) -> None:
    """Refuse an input or a result in a device-specific format.

    Args:
        tensor: on any device.
        what: the tensor's description, which begins the message.

    Raises:
        CaptureError: the tensor has such a format; the message names it.
    """
    name = own_format(tensor)
    if name:
        size_bytes = tensor.untyped_storage().nbytes()
        raise CaptureError(
            f"{user_location()}: {what} lies in the device's format {name}, {size_bytes} bytes "
            f"for shape {list(tensor.shape)}: only tensors that the model holds may, since inputs "
            "and results are bound as plain memory: cast it with "
            "torch_npu.npu_format_cast(tensor, 2)"
        )


def refuse_write_in_own_format(name: str, value: Value) -> None:
    """Refuse an operator that writes a weight in a device-specific format.

    The check of a recording and the warm-up write copies, and a copy of its bytes is plain.

    Raises:
        CaptureError: `value` is such a weight.
    """
    if value.device_format:
        raise CaptureError(
            f"{user_location()}: {name} writes {value.name}, which lies in the device's format "
            f"{value.device_format}: cast it with torch_npu.npu_format_cast(tensor, 2) before the "
            "capture"
        )


def refuse_unwritten_in_own_format(value: Value) -> None:
    """Refuse memory without content in a device-specific format: a replay's is plain.

    Raises:
        CaptureError: `value` has such a format.
    """
    if value.device_format:
        raise CaptureError(
            f"{user_location()}: {value.name} is memory without content in the device's format "
            f"{value.device_format}: cast a tensor that has content with "
            f"torch_npu.npu_format_cast"
        )
