"""Functions that resize images, whose C++ asks a tensor for sizes as Python numbers.

torch.nn.functional.interpolate calls them: they compute the result's sizes from factors, and call
the recorded operator (aten/src/ATen/native/UpSample.cpp, compute_output_size: the size times the
factor, in double, without its fraction).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_NAMES = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip


def resizes(is_watched: Callable[[Any], bool]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield for each such function of torch._C._nn a replacement that asks for no numbers.

    Args:
        is_watched: whether a size is a symbol of a recording; others go to torch's own function.
    """
    for name in _NAMES:
        own = getattr(torch._C._nn, name)
        yield name, _resize(own, getattr(torch.ops.aten, name).default, is_watched)


def _resize(
    own: Callable[..., Any], operator: Callable[..., Any], is_watched: Callable[[Any], bool]
) -> Callable[..., Any]:
    @functools.wraps(own)
    def resized(given: torch.Tensor, *options: Any, **named: Any) -> Any:
        sizes: Sequence[Any] | None = options[0] if options else None
        if named or not any(map(is_watched, (*given.shape, *(sizes or ())))):
            return own(given, *options, **named)
        _, *corners, factors = options
        if sizes is None:
            sizes = [math.trunc(n * by) for n, by in zip(given.shape[2:], factors, strict=True)]
        return operator(given, sizes, *corners, *(factors or [None] * len(sizes)))

    return resized
