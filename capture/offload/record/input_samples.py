"""Contents of a recorded call's inputs, kept for executions that the user did not request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.interpreter.eager_run import bytes_of, content_bytes
from offload.interpreter.made_up_inputs import SAMPLE_BYTES
from offload.interpreter.torch_names import dtype_name
from offload.program import is_dense, span_bytes

SAMPLES_BYTES = 2**26
"""Limit of all samples together: torch.compile makes parameters inputs."""

_UNIT_BYTES = 16  # of the largest items


def input_samples(tensors: Sequence[torch.Tensor]) -> tuple[bytes, ...]:
    """The first bytes of each tensor, from its first item on, as they are now.

    Meta tensors have no bytes. Memory between a tensor's items belongs to others and is given as 0,
    except for tensors that lie in each other's gaps.
    """
    ranges = [_range(one) for one in tensors]
    limits_bytes = _limits_bytes(tensors, [end - begin for begin, end in ranges])
    return tuple(
        _sample(one, most_bytes, keeps_gaps=_is_full(one) or _is_shared(leaf, ranges))
        for leaf, (one, most_bytes) in enumerate(zip(tensors, limits_bytes, strict=True))
    )


def _limits_bytes(tensors: Sequence[torch.Tensor], sizes_bytes: Sequence[int]) -> list[int]:
    """The greatest length of each sample: integers first, as only they can be indices.

    Within either kind, small samples are taken whole and large ones share the rest.
    """
    limits_bytes, left_bytes = [0] * len(tensors), SAMPLES_BYTES
    for is_integer in (True, False):
        leaves = [leaf for leaf, one in enumerate(tensors) if _is_integer(one) is is_integer]
        leaves.sort(key=lambda leaf: sizes_bytes[leaf])
        for n_done, leaf in enumerate(leaves):
            share_bytes = left_bytes // (len(leaves) - n_done) // _UNIT_BYTES * _UNIT_BYTES
            limit_bytes = min(SAMPLE_BYTES, max(_UNIT_BYTES, share_bytes), sizes_bytes[leaf])
            if limit_bytes < sizes_bytes[leaf]:
                limit_bytes = _whole_rows(tensors[leaf], limit_bytes)
            limits_bytes[leaf] = limit_bytes
            left_bytes = max(0, left_bytes - limit_bytes)
    return limits_bytes


def _whole_rows(tensor: torch.Tensor, most_bytes: int) -> int:
    """The limit in whole rows, so that repeated rows lie where the tensor's items do.

    The limit itself where not even one row fits.
    """
    shape, strides = tensor.shape, tensor.stride()
    used = (stride for size, stride in zip(shape, strides, strict=True) if size > 1)
    row_bytes = max(used, default=0) * tensor.element_size()
    return most_bytes - most_bytes % row_bytes if 0 < row_bytes <= most_bytes else most_bytes


def _is_integer(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _is_full(tensor: torch.Tensor) -> bool:
    return is_dense(tuple(tensor.shape), tuple(tensor.stride()))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and one past its last; empty on the meta device."""
    if tensor.device.type == "meta" or not tensor.numel():
        return 0, 0
    begin = tensor.untyped_storage().data_ptr()
    begin += int(tensor.storage_offset()) * tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return begin, begin + span_bytes(shape, strides, dtype_name(tensor.dtype))


def _is_shared(leaf: int, ranges: Sequence[tuple[int, int]]) -> bool:
    begin, end = ranges[leaf]
    return any(
        one_begin < end and begin < one_end
        for other, (one_begin, one_end) in enumerate(ranges)
        if other != leaf
    )


def _sample(tensor: torch.Tensor, most_bytes: int, *, keeps_gaps: bool) -> bytes:
    if not most_bytes:
        return b""
    item_bytes = tensor.element_size()
    begin = int(tensor.storage_offset()) * item_bytes
    content = bytes_of(tensor.untyped_storage())[begin : begin + most_bytes].cpu()
    if keeps_gaps:
        return content_bytes(content)
    held = _held_items(tuple(tensor.shape), tuple(tensor.stride()), most_bytes // item_bytes)
    return content_bytes(content.view(-1, item_bytes) * held.view(-1, 1))


def _held_items(shape: tuple[int, ...], strides: tuple[int, ...], n_items: int) -> torch.Tensor:
    """For each of the first places, whether an item of a strided tensor lies there: uint8."""
    sizes = tuple(  # limited to what matters, as the tensor may be of any size
        min(size, -(-n_items // stride)) if stride else 1
        for size, stride in zip(shape, strides, strict=True)
    )
    n_places = max(n_items, span_bytes(sizes, strides, "uint8"))
    held = torch.zeros(n_places, dtype=torch.uint8, device="cpu")
    held.as_strided(sizes, strides).fill_(1)
    return held[:n_items]
