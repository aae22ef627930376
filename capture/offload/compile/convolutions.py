"""Operands of the image templates: convolutions and pooling."""

from __future__ import annotations

import dataclasses
import math

from offload.compile.refusal import UnsupportedRegion
from offload.program import ITEM_BYTES, Launch, TensorView, contiguous_strides, same_strides

CONVOLUTION = "aten::convolution"
MAX_POOL = "aten::max_pool2d_with_indices"

FEW_PIXELS = 32
"""Up to this number the weights are read as a packed matrix, beyond it in place."""

_MOST_POOLED = 1 << 13
"""The most numbers of a padded row, as far as windows reach: some rows are on the stack."""

_LONGEST_VECTOR = 16  # floats

_SLACK_BYTES = 2 * 4 * _LONGEST_VECTOR
"""Behind padded images: two of the longest vectors (`PaddedImages::kSlack`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of images in two dimensions, or in one with height 1.

    Its template is in `kernels/convolution.hpp`.

    Attributes:
        x: [images, channels, (height,) width].
        w: [out_channels, channels / groups, (kernel_height,) kernel_width].
        bias: [out_channels], or None.
        out: [images, out_channels, (out_height,) out_width].
        stride, padding, dilation: of height and width.
        groups: of channels.
    """

    x: TensorView
    w: TensorView
    bias: TensorView | None
    out: TensorView
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def sizes(self) -> str:
        """A `ConvolutionSizes` in C++."""
        (height, width), (out_height, out_width) = _area(self.x), _area(self.out)
        numbers = (
            *(*self.x.shape[:2], height, width),
            *(self.out.shape[1], out_height, out_width),
            *_area(self.w),
            *self.stride,
            *self.padding,
            *self.dilation,
            self.groups,
        )
        return f"ConvolutionSizes{{{', '.join(map(str, numbers))}}}"

    @property
    def is_pointwise(self) -> bool:
        """Whether each output pixel depends on a single input pixel at the same place."""
        taps = _area(self.w)
        return taps == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel depends on a single input channel."""
        return self.groups == self.x.shape[1]

    @property
    def n_pixels(self) -> int:
        """The number of output pixels, over all images."""
        return self.out.shape[0] * math.prod(self.out.shape[2:])

    @property
    def has_few_pixels(self) -> bool:
        """Whether reading the weights dominates, so that they are multiplied as a matrix."""
        is_one_product = self.groups == 1 and not self.is_depthwise
        return is_one_product and self.n_pixels <= FEW_PIXELS

    @property
    def template(self) -> str:
        """The name of the struct in C++."""
        if self.has_few_pixels:
            return "ConvolutionOfFewPixels"
        if self.is_depthwise:
            return "DepthwiseConvolution"
        return "PointwiseConvolution" if self.is_pointwise else "Convolution"

    @property
    def adds(self) -> bool:
        """Whether the template adds a tensor to the result."""
        return self.template in ("Convolution", "PointwiseConvolution")

    @property
    def matrix(self) -> TensorView:
        """The weights as that matrix: a column for each output channel."""
        columns, depth = self.w.shape[0], math.prod(self.w.shape[1:])
        return dataclasses.replace(self.w, shape=(depth, columns), strides=(1, depth))

    @property
    def scratch_bytes(self) -> int:
        """The size of the memory between its inputs and its result; 0 if it needs none."""
        if self.has_few_pixels:
            count = self.n_pixels * (self.matrix.shape[0] + self.matrix.shape[1])
            return count * ITEM_BYTES[self.x.dtype]
        if self.template == "PointwiseConvolution":
            return 0
        (height, width), (above, before) = _area(self.x), self.padding
        count = self.x.shape[0] * self.x.shape[1] * (height + 2 * above) * (width + 2 * before)
        return count * ITEM_BYTES[self.x.dtype] + _SLACK_BYTES


def convolution(launch: Launch) -> Convolution:
    """Read a launch of `CONVOLUTION`.

    Raises:
        UnsupportedRegion: the template does not support it.
    """
    x, w, bias, stride, padding, dilation, transposed, _, groups = launch.arguments
    (out,) = launch.made()
    if not (isinstance(x, TensorView) and isinstance(w, TensorView)):
        raise UnsupportedRegion("a convolution whose operands are not tensors")
    if transposed:
        raise UnsupportedRegion("a transposed convolution")
    if len(x.shape) not in (3, 4):
        raise UnsupportedRegion(f"a convolution of {len(x.shape)} dimensions, not of 3 or 4")
    given = [x, w, out, *([bias] if isinstance(bias, TensorView) else [])]
    if any(one.dtype != "float32" for one in given):
        dtypes = sorted({one.dtype for one in given})
        raise UnsupportedRegion(f"convolutions are of float32, not of {' and '.join(dtypes)}")
    named = ["images", "weights", "images", "biases"]
    for one, what in zip(given, named, strict=False):
        if not same_strides(one.shape, one.strides, contiguous_strides(one.shape)):
            raise UnsupportedRegion(
                f"a convolution of {what} that are not laid out channel by channel"
            )
    dimensions = len(x.shape) - 2
    return Convolution(
        x,
        w,
        bias if isinstance(bias, TensorView) else None,
        out,
        _pair(_spread(stride, dimensions), 1),
        _pair(_spread(padding, dimensions), 0),
        _pair(_spread(dilation, dimensions), 1),
        int(groups),  # type: ignore[arg-type]
    )


def max_pool_sizes(launch: Launch) -> str:
    """A `PoolSizes` in C++ (`kernels/pooling.hpp`) for a launch of `MAX_POOL`.

    Raises:
        UnsupportedRegion: the template does not support it.
    """
    x, kernel, stride, padding, dilation, _ = launch.arguments
    (out, *_) = launch.made()
    if not isinstance(x, TensorView) or x.dtype != "float32":
        raise UnsupportedRegion("pooling of other dtypes than float32")
    if not all(
        same_strides(one.shape, one.strides, contiguous_strides(one.shape)) for one in (x, out)
    ):
        raise UnsupportedRegion("pooling of images that are not laid out channel by channel")
    area, steps = _both(kernel), _both(stride or kernel)
    around, apart = _both(padding), _both(dilation)
    reach = out.shape[-1] * steps[1] + (area[1] - 1) * apart[1]
    # One more vector of windows is read behind the last one.
    if max(reach, x.shape[-1] + around[1]) + _LONGEST_VECTOR * steps[1] > _MOST_POOLED:
        raise UnsupportedRegion(f"pooling of rows of more than {_MOST_POOLED} numbers")
    planes = math.prod(x.shape[:-2])
    numbers = (planes, *x.shape[-2:], *out.shape[-2:], *area, *steps, *around, *apart)
    return f"PoolSizes{{{', '.join(map(str, numbers))}}}"


def _area(view: TensorView) -> tuple[int, int]:
    return (view.shape[2], view.shape[3]) if len(view.shape) == 4 else (1, view.shape[2])


def _pair(argument: object, of_height: int) -> tuple[int, int]:
    """Numbers for height and width; `of_height` is used for the height of one dimension."""
    if not isinstance(argument, tuple) or not all(isinstance(one, int) for one in argument):
        raise UnsupportedRegion(f"a convolution with {argument!r}")
    height, width = argument if len(argument) == 2 else (of_height, *argument)
    return height, width


def _spread(argument: object, dimensions: int) -> object:
    """One number per dimension; torch accepts a single one for all."""
    is_one = isinstance(argument, tuple) and len(argument) == 1
    return argument * dimensions if is_one else argument  # type: ignore[operator]


def _both(argument: object) -> tuple[int, int]:
    """Numbers for height and width; a single one counts for both."""
    return _pair(_spread(argument, 2), 1)
