"""Replacements of C++ functions that ask sizes for Python numbers, which do not ask.

The replacements call the same operators as the functions. A capture compares both, like everything
that it records over sizes. Tensors and numbers from outside the recording go to the original
functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy import functions as symbolic

from offload.console.user_code import user_location
from offload.errors import CaptureError

IsWatched = Callable[[Any], bool]

_LOGARITHM = math.log
_MOST_EXACT_ROOT = 2**52
_MOST_EXACT_LOGARITHM = 2**40

# The options of torch.max_pool1d in order.
_POOLED = {"kernel_size": 1, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}


def functions(is_watched: IsWatched) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield for each such function the holder where it is looked up, its name, and its replacement.

    Args:
        is_watched: whether a size is a symbol of a recording.
    """
    for name, replacement in _OF_MATH.items():
        yield math, name, replacement(getattr(math, name), is_watched)
    yield torch, "max_pool1d", _pooled(torch.max_pool1d, is_watched)


def _root(own: Callable[..., float], is_watched: IsWatched) -> Callable[..., Any]:
    @functools.wraps(own)
    def root(number: Any, /) -> Any:
        # Sizes for which Python raises an error are guarded.
        if not is_watched(number) or number < 0:
            return own(number)
        return torch.sym_sqrt(number)

    return root


def _opaque(function: Any, own: Callable[..., float], number: Any) -> torch.SymFloat:
    """A function of a symbol about which torch knows nothing."""
    node = number.node
    return torch.SymFloat(SymNode(function(node.expr), node.shape_env, float, own(node.hint)))


def _natural_logarithm(number: Any) -> torch.SymFloat:
    return _opaque(symbolic.OpaqueUnaryFn_log, _LOGARITHM, number)


def _logarithm(own: Callable[..., float], is_watched: IsWatched) -> Callable[..., Any]:
    """As math_log of Modules/mathmodule.c: one natural logarithm divided by the other."""

    def natural(number: Any) -> Any:
        # Sizes for which Python raises an error are guarded.
        if not is_watched(number) or number <= 0:
            return own(number)
        return _natural_logarithm(number)

    @functools.wraps(own)
    def logarithm(number: Any, /, *base: Any) -> Any:
        if len(base) > 1 or not any(map(is_watched, (number, *base))) or 1 in base:
            return own(number, *base)
        return natural(number) / natural(base[0]) if base else natural(number)

    return logarithm


def _of_one(function: Any, *, is_above_zero: bool = False) -> Callable[..., Callable[..., Any]]:
    """As a function of math, which converts its argument to a fraction."""

    def replacement(own: Callable[..., float], is_watched: IsWatched) -> Callable[..., Any]:
        @functools.wraps(own)
        def computed(number: Any, /) -> Any:
            if not is_watched(number) or isinstance(number, torch.SymBool):
                return own(number)
            # Sizes for which Python raises an error are guarded.
            if is_above_zero and number <= 0:
                return own(number)
            return _opaque(function, own, number)

        return computed

    return replacement


def _common(operation: str) -> Callable[..., Callable[..., Any]]:
    """As math.gcd and math.lcm, which torch does not know: symbols that follow from others."""

    def replacement(own: Callable[..., int], is_watched: IsWatched) -> Callable[..., Any]:
        def of_two(one: Any, other: Any) -> Any:
            symbols = [number for number in (one, other) if is_watched(number)]
            if not symbols:
                return own(one, other)
            environment = symbols[0].node.shape_env
            return environment.derived(operation, own, one, other)

        @functools.wraps(own)
        def common(*numbers: Any) -> Any:
            if not any(map(is_watched, numbers)) or not all(map(_is_integer, numbers)):
                return own(*numbers)
            return functools.reduce(of_two, numbers) if len(numbers) > 1 else abs(numbers[0])

        return common

    return replacement


def _is_integer(number: Any) -> bool:
    return type(number) in (int, bool, torch.SymInt)


def _power(own: Callable[..., float], is_watched: IsWatched) -> Callable[..., Any]:
    """As math.pow, which converts both to fractions."""

    @functools.wraps(own)
    def power(base: Any, exponent: Any, /) -> Any:
        # Python handles the special cases of other numbers (Modules/mathmodule.c, math_pow_impl).
        if not any(map(is_watched, (base, exponent))) or base <= 0:
            return own(base, exponent)
        return torch.sym_float(base) ** torch.sym_float(exponent)

    return power


def _integer_root(own: Callable[..., int], is_watched: IsWatched) -> Callable[..., Any]:
    """As math.isqrt: up to 2**52 the double square root rounded down equals it."""

    @functools.wraps(own)
    def root(number: Any, /) -> Any:
        if not is_watched(number) or isinstance(number, torch.SymFloat) or number < 0:
            return own(number)
        return math.floor(torch.sym_sqrt(number)) if number <= _MOST_EXACT_ROOT else own(number)

    return root


def n_bits(number: Any) -> Any:
    """As int.bit_length of a symbol.

    The number plus a half is not a power of 2. Up to 2**40 its logarithm is further from those of
    powers of 2 than its rounding error.
    """
    magnitude = abs(number)
    if magnitude == 0:
        return 0
    if magnitude > _MOST_EXACT_LOGARITHM:
        return int(number).bit_length()
    return math.floor(_natural_logarithm(magnitude + 0.5) / math.log(2)) + 1


def _pooled(own: Callable[..., Any], is_watched: IsWatched) -> Callable[..., Any]:
    """As max_pool1d_with_indices of aten/src/ATen/native/Pooling.cpp: rows of pictures."""

    @functools.wraps(own)
    def pooled(*args: Any, **named: Any) -> Any:
        if not args or not any(map(is_watched, getattr(args[0], "shape", ()))):
            return own(*args, **named)
        given, *options = args
        chosen = {**_POOLED, **dict(zip(_POOLED, options, strict=False)), **named}
        ceil_mode = chosen.pop("ceil_mode")
        kernel, steps, pads, apart = map(_only, chosen.values())
        rows = torch.ops.aten.max_pool2d_with_indices.default(
            given.unsqueeze(-2),
            [1, kernel],
            [1, kernel if steps is None else steps],
            [0, pads],
            [1, apart],
            ceil_mode,
        )
        return rows[0].squeeze(-2)

    return pooled


def _only(option: Any) -> Any:
    """The single number of an option, if any."""
    if isinstance(option, (tuple, list)):
        return option[0] if option else None
    return option


def layer_by_steps(name: str, args: tuple[Any, ...], is_watched: IsWatched) -> Any:
    """Replace a recurrent layer that is not recorded as one launch.

    Args:
        name: the name of torch's function.
        args: its arguments.
        is_watched: whether a size is a symbol of a recording.

    Returns:
        NotImplemented if no size varies.

    Raises:
        CaptureError: a size varies, and the number of launches may vary with it.
    """
    if not any(map(is_watched, args[0].shape)):
        return NotImplemented
    raise CaptureError(
        f"{user_location()}: torch.{name} launches each of its steps where it applies dropout in "
        "training, needs gradients, or runs under autocast, and the sizes of its input vary: "
        "capture the model for each size, or call the layer otherwise"
    )


_OF_MATH: Mapping[str, Callable[..., Callable[..., Any]]] = {
    "sqrt": _root,
    "log": _logarithm,
    "pow": _power,
    "isqrt": _integer_root,
    "exp": _of_one(symbolic.OpaqueUnaryFn_exp),
    "log2": _of_one(symbolic.OpaqueUnaryFn_log2, is_above_zero=True),
    "sin": _of_one(symbolic.OpaqueUnaryFn_sin),
    "cos": _of_one(symbolic.OpaqueUnaryFn_cos),
    "gcd": _common("greatest_divisor"),
    "lcm": _common("least_multiple"),
}
