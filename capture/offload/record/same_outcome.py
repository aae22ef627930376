"""Whether two runs of the same call came out the same."""

from __future__ import annotations

import torch

from offload.record.operators import as_integers


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (tensor.detach().resolve_conj().resolve_neg() for tensor in (one, other))
    return torch.equal(as_integers(one), as_integers(other))


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and, to torch.testing's tolerance, values.

    float8 has no tolerance.
    """
    if same_bits(one, other):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.is_floating_point and one.element_size() == 1:
        return False
    try:
        torch.testing.assert_close(one.detach(), other.detach(), equal_nan=True)
    except AssertionError:
        return False
    return True


def as_dtype(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements of a dtype; what is left over at the end is not compared."""
    whole = content.numel() // dtype.itemsize * dtype.itemsize
    return content[:whole].clone().view(dtype)  # a copy is aligned, a slice may not be
