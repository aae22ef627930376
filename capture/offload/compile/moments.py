"""Means and variances by torch's methods, where Inductor's lose significant digits.

Inductor sums a row in float32, and squares the deviation of each number. For a row whose numbers
are large compared with their differences, the mean is then wrong by some units in the last place of
these numbers, which a division by a small deviation amplifies. Torch computes moments by Welford's
method: of normalisations in float32 (aten/src/ATen/native/cpu/moments_utils.h), of `var` and `std`
in float64 (aten/src/ATen/native/cpu/ReduceOpsKernel.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _normalized(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised row, its mean, and the reciprocal of its deviation.

    The mean of the deviations corrects the mean, and its square the variance, both in the same pass
    as the variance.
    """
    near = x.mean(dims, keepdim=True)
    left = x - near
    rest = left.mean(dims, keepdim=True)
    variance = ((left * left).mean(dims, keepdim=True) - rest * rest).clamp_min(0.0)
    factor = torch.rsqrt(variance + eps)
    return (left - rest) * factor, near + rest, factor


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    found, mean, factor = _normalized(_widened(x), dims, eps)
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    return found.to(x.dtype), mean.to(x.dtype), factor.to(x.dtype)


def _group_norm(  # noqa: PLR0917 - as the operator takes them
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n_images: int,
    n_channels: int,
    n_pixels: int,
    n_groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _widened(x).reshape(n_images, n_groups, n_channels // n_groups * n_pixels)
    found, mean, factor = _normalized(rows, [2], eps)
    found = found.reshape(x.shape)
    each = [1, n_channels, *[1] * (x.dim() - 2)]
    found = found if weight is None else found * weight.reshape(each)
    found = found if bias is None else found + bias.reshape(each)
    return found.to(x.dtype), mean[..., 0].to(x.dtype), factor[..., 0].to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x


def _moments(
    x: Tensor, dim: Sequence[int] | None, correction: float | None, *, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """The variance and the mean of rows, in float64."""
    dims = [one % x.dim() for one in dim] if dim and x.dim() else list(range(x.dim()))
    n_items = 1
    for one in dims:
        n_items *= int(x.shape[one])
    wide = x.to(torch.float64)
    mean = wide.mean(dims, keepdim=True) if dims else wide
    left = wide - mean
    squares = (left * left).sum(dims, keepdim=keepdim) if dims else left * left
    variance = squares / max(n_items - (1 if correction is None else correction), 0)
    if not keepdim and dims:
        for one in sorted(dims, reverse=True):
            mean = mean.squeeze(one)
    return variance, mean


def _variance(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    return _moments(x, dim, correction, keepdim=keepdim)[0].to(x.dtype)


def _variance_and_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction, keepdim=keepdim)
    return variance.to(x.dtype), mean.to(x.dtype)


def _deviation(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    return _moments(x, dim, correction, keepdim=keepdim)[0].sqrt().to(x.dtype)


def _deviation_and_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction, keepdim=keepdim)
    return variance.sqrt().to(x.dtype), mean.to(x.dtype)


MOMENTS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.native_layer_norm.default: _layer_norm,
    torch.ops.aten.native_group_norm.default: _group_norm,
    torch.ops.aten.var.correction: _variance,
    torch.ops.aten.var_mean.correction: _variance_and_mean,
    torch.ops.aten.std.correction: _deviation,
    torch.ops.aten.std_mean.correction: _deviation_and_mean,
}
"""Operators made of sums that lose no more digits than torch's."""
