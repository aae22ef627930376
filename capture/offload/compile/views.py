"""Views of memory as view operators, which compilers follow where raw strides stop them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class ViewSteps:
    """How to get from a tensor that fills its memory to a view of that memory.

    Attributes:
        to_memory: the order of dimensions in which the tensor is contiguous.
        extents: the dimensions that its memory is then cut into, as one reshape.
        begins, sizes: for each of them the part that the view shows; a single index if of size 1.
        order: of the remaining ones in the view.
        shape: of the view, with dimensions of one element inserted, repeated ones of size 1.
        repeated: the shape again, with repeated dimensions at their size.
    """

    to_memory: tuple[int, ...]
    extents: tuple[int, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    repeated: tuple[int, ...]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of such a tensor."""
        found = tensor.permute(self.to_memory).reshape(self.extents)
        for dimension, (begin, size) in enumerate(zip(self.begins, self.sizes, strict=True)):
            if size != self.extents[dimension]:
                found = found.narrow(dimension, begin, size)
        kept = [size for size in self.sizes if size > 1]
        found = found.reshape(kept).permute(self.order)
        return found.reshape(self.shape).expand(self.repeated)


def find_steps(
    shape: Sequence[int],
    strides: Sequence[int],
    view_shape: Sequence[int],
    view_strides: Sequence[int],
    offset: int,
) -> ViewSteps | None:
    """Find how view operators make a view of a tensor's memory.

    The memory is cut into dimensions by the strides of the view, the largest first: each must
    divide the one before. The view's dimensions are then ranges of these.

    Args:
        shape: of a tensor that fills its memory without aliasing elements.
        strides: of that tensor.
        view_shape: of the view.
        view_strides: of the view.
        offset: in elements, from the tensor's first.

    Returns:
        None if the view is not of that form: its elements overlap, its rows begin at no multiple,
        or it runs across the end of a row.
    """
    to_memory = sorted(range(len(shape)), key=lambda one: (-strides[one], -shape[one]))
    moving = [
        dimension
        for dimension, (size, stride) in enumerate(zip(view_shape, view_strides, strict=True))
        if size > 1 and stride > 0
    ]
    sorted_dimensions = sorted(moving, key=lambda one: -view_strides[one])
    cuts = [view_strides[one] for one in sorted_dimensions]
    limits = [math.prod(shape), *cuts]
    if any(not one or one % other for one, other in zip(limits, [*cuts, 1], strict=True)):
        return None
    extents = [one // other for one, other in zip(limits, [*cuts, 1], strict=True)]
    begins = []
    for cut in [*cuts, 1]:
        begins.append(offset // cut)
        offset %= cut
    sizes = [view_shape[one] for one in sorted_dimensions] + [1]
    parts = zip(begins, sizes, extents, strict=True)
    if any(begin + size > extent for begin, size, extent in parts):
        return None
    single = tuple(size if dimension in moving else 1 for dimension, size in enumerate(view_shape))
    return ViewSteps(
        tuple(to_memory),
        tuple(extents),
        tuple(begins),
        tuple(sizes),
        tuple(sorted_dimensions.index(one) for one in moving),
        single,
        tuple(view_shape),
    )
