"""What the inputs of a recorded call held, kept for executions that nobody asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.eager_run import bytes_of
from offload.made_up_inputs import SAMPLE_BYTES
from offload.program import span_bytes
from offload.torch_names import dtype_name

SAMPLES_BYTES = 2**26
"""Of all: torch.compile makes inputs of parameters."""

_UNIT_BYTES = 16  # of the largest items


def input_samples(tensors: Sequence[torch.Tensor]) -> tuple[bytes, ...]:
    """The first bytes of each tensor, from its own first item on, as they are now.

    Those on the meta device have none.
    """
    share_bytes = SAMPLES_BYTES // max(1, len(tensors)) // _UNIT_BYTES * _UNIT_BYTES
    most_bytes = min(SAMPLE_BYTES, max(_UNIT_BYTES, share_bytes))
    return tuple(_sample(one, most_bytes) for one in tensors)


def _sample(tensor: torch.Tensor, most_bytes: int) -> bytes:
    if tensor.device.type == "meta" or not tensor.numel():
        return b""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    span = span_bytes(tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
    content = bytes_of(tensor.untyped_storage())[begin : begin + min(span, most_bytes)]
    return content.cpu().numpy().tobytes()
