"""Whether two runs of the same call have the same outcome."""

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


# Relative to the largest value of a tensor. Kernels with another order of summation differ by some
# units in the last place, which grow through the layers of a model.
_TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def same_but_for_kernels(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree as far as other kernels for the same computation would.

    Floating point values agree within a ten-thousandth of the largest value of their tensor
    (float32; other dtypes by their precision), all other values bit by bit.
    """
    tolerance = _TOLERANCES.get(one.dtype)
    if tolerance is None or one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return same_bits(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.detach().to(wide), other.detach().to(wide)
    largest = one.abs().nan_to_num(posinf=0.0).max().item()
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * largest, equal_nan=True)


def as_dtype(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements of a dtype; a remainder at the end is not compared."""
    whole = content.numel() // dtype.itemsize * dtype.itemsize
    return content[:whole].clone().view(dtype)  # a copy is aligned, a slice may not be
