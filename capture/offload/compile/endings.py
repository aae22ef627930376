"""What may follow a product in its template: batch norm, an added tensor, an activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from offload.compile.functional import functional_name
from offload.compile.refusal import UnsupportedRegion
from offload.program import (
    Argument,
    Launch,
    Program,
    Role,
    TensorView,
    contiguous_strides,
    same_strides,
)

NORM = "aten::_native_batch_norm_legit_no_training"
_ADD = "aten::add.Tensor"

_ACTIVATIONS: Mapping[tuple[str, tuple[Argument, ...]], str] = {
    ("aten::relu", ()): "kRelu",
    ("aten::gelu", ("none",)): "kGelu",
    ("aten::gelu", ("tanh",)): "kGeluTanh",
    ("aten::silu", ()): "kSilu",
    ("aten::tanh", ()): "kTanh",
    ("aten::sigmoid", ()): "kSigmoid",
    ("aten::hardtanh", (0, 6)): "kRelu6",
    ("aten::hardswish", ()): "kHardswish",
}

_ENDINGS = frozenset((NORM, _ADD, *(name for name, _ in _ACTIVATIONS)))

MOST_LAUNCHES = 3
"""The most launches of an ending."""


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """A batch norm with known statistics. Each tensor has a number for each channel."""

    weight: TensorView | None
    bias: TensorView | None
    mean: TensorView
    variance: TensorView
    epsilon: float


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """What follows a product in its region, in this order.

    Attributes:
        norm: a batch norm of its channels, the second dimension.
        added: a tensor with the layout of the result.
        activation: its name in C++ (`kernels/ending.hpp`).
    """

    norm: Norm | None
    added: TensorView | None
    activation: str

    def source(self, *, has_bias: bool) -> str:
        """An `Ending` in C++, for a product with or without a bias."""
        flags = (has_bias or self.norm is not None, self.norm is not None, self.added is not None)
        shown = ", ".join("true" if flag else "false" for flag in flags)
        return f"Ending{{Activation::{self.activation}, {shown}}}"


def may_end(launch: Launch) -> bool:
    """Whether a launch behind a product may be part of its ending."""
    return launch.name in _ENDINGS or functional_name(launch) in _ENDINGS


def read_ending(program: Program) -> Ending:
    """Read the launches behind the first one of a region as an ending.

    Args:
        program: the region as a Program. Its launches write only what they make.

    Raises:
        UnsupportedRegion: they are not an ending, or intermediate results are used elsewhere.
    """
    (made, *_) = program.launches[0].made()
    rest = list(program.launches[1:])
    norm = added = None
    activation = "kNone"
    if rest and rest[0].name == NORM:
        norm = _norm(rest[0], made)
        (made, *_) = rest.pop(0).made()
    if rest and rest[0].name == _ADD:
        added = _added(program, rest[0], made)
        (made,) = rest.pop(0).made()
    if rest and rest[0].name in _ENDINGS:
        activation = _activation(rest[0], made)
        (made,) = rest.pop(0).made()
    if rest:
        raise UnsupportedRegion(f"{rest[0].name} after a product")
    if [one.view.value for one in program.results] != [made.value]:
        raise UnsupportedRegion("a product that other launches read unchanged")
    return Ending(norm, added, activation)


def sums_of(program: Program) -> int:
    """The launch of a region whose result others add to and activate; -1 if none follow."""
    at = int(len(program.launches) > 1 and program.launches[1].name == NORM)
    return at if at + 1 < len(program.launches) else -1


def _norm(launch: Launch, made: TensorView) -> Norm:
    given, weight, bias, mean, variance, _, epsilon = launch.arguments
    channels = made.shape[1:2]
    numbers = [weight, bias, mean, variance]
    views = [one for one in numbers if isinstance(one, TensorView)]
    if given != made or any(
        (one.shape, one.dtype) != (channels, "float32")
        or not same_strides(one.shape, one.strides, (1,))
        for one in views
    ):
        raise UnsupportedRegion("a batch norm of other channels than the product's")
    if not (isinstance(mean, TensorView) and isinstance(variance, TensorView)):
        raise UnsupportedRegion("a batch norm without statistics")
    return Norm(
        weight if isinstance(weight, TensorView) else None,
        bias if isinstance(bias, TensorView) else None,
        mean,
        variance,
        float(epsilon),  # type: ignore[arg-type]
    )


def _added(program: Program, launch: Launch, made: TensorView) -> TensorView:
    one, other, factor = launch.arguments
    added = other if one == made else one
    if made not in (one, other) or not isinstance(added, TensorView) or factor != 1:
        raise UnsupportedRegion("an addition of other operands than a tensor and a product")
    is_alike = (added.shape, added.dtype) == (made.shape, made.dtype) and same_strides(
        made.shape, added.strides, made.strides
    )
    if not is_alike or program.values[added.value].role is not Role.INPUT:
        raise UnsupportedRegion("an addition of a tensor with another layout")
    return added


def _activation(launch: Launch, made: TensorView) -> str:
    given = launch.arguments[0]
    if (
        not isinstance(given, TensorView)
        or given.value != made.value
        or not same_strides(given.shape, given.strides, contiguous_strides(given.shape))
        or given.offset_bytes
        or given.end_bytes != made.end_bytes
    ):
        raise UnsupportedRegion("an activation of a part of a product")
    name = _ACTIVATIONS.get((launch.name, launch.arguments[1:]))
    if name is None:
        raise UnsupportedRegion(f"{launch.name} with unknown arguments")
    return name
