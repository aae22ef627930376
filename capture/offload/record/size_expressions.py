"""Converts torch's expressions of symbolic sizes to those that a Family evaluates.

torch writes them with sympy and its own functions (torch/utils/_sympy/functions.py). Functions that
are not listed here are refused, so that every number is computed as the model would.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from torch.utils._sympy import functions

from offload.errors import CaptureError
from offload.program.expressions import INTEGER, REAL, Expression, Instruction

# Functions with exactly as many operands as the operation takes.
_PLAIN: Mapping[Any, str] = {
    functions.FloorDiv: "floor_divide",
    functions.CleanDiv: "floor_divide",
    functions.Mod: "modulo",
    functions.PythonMod: "modulo",
    functions.PowByNatural: "power",
    functions.IntTrueDiv: "true_divide",
    functions.FloatTrueDiv: "true_divide",
    functions.FloatPow: "power",
    functions.Where: "where",
    functions.ToFloat: "to_real",
    functions.FloorToInt: "floor",
    functions.CeilToInt: "ceiling",
    functions.TruncToInt: "truncate",
    functions.RoundToInt: "round",
    functions.OpaqueUnaryFn_sqrt: "square_root",
    functions.OpaqueUnaryFn_log: "logarithm",
    functions.OpaqueUnaryFn_log2: "binary_logarithm",
    functions.OpaqueUnaryFn_exp: "exponential",
    functions.OpaqueUnaryFn_sin: "sine",
    functions.OpaqueUnaryFn_cos: "cosine",
    functions.RoundDecimal: "round_decimals",
    sympy.Not: "not",
    sympy.Eq: "equal",
    sympy.Ne: "not_equal",
    sympy.Lt: "less",
    sympy.Le: "less_equal",
}
_SWAPPED: Mapping[Any, str] = {sympy.Gt: "less", sympy.Ge: "less_equal"}
# Functions with any number of operands.
_REPEATED: Mapping[Any, str] = {
    functions.Max: "maximum",
    functions.Min: "minimum",
    sympy.Max: "maximum",
    sympy.Min: "minimum",
    sympy.And: "and",
    sympy.Or: "or",
}
_OF_INTEGERS: Mapping[Any, str] = {sympy.Add: "add", sympy.Mul: "multiply"}
_MOST_EXACT = 2**62
_MOST_DECIMALS = 100  # of native/plan/size_numbers.cpp


Codes = Mapping[Any, Sequence[Instruction]]
"""The code of each symbol."""


def to_expression(expression: Any, codes: Codes) -> Expression:
    """Write a sympy expression as postfix code.

    Args:
        expression: as torch keeps it.
        codes: of its symbols.

    Raises:
        CaptureError: it holds an unknown function, or a fraction is not computed as in the model:
            sympy has merged several roundings.
    """
    return Expression(tuple(_code(sympy.sympify(expression), codes)))


def _code(node: Any, codes: Codes) -> list[Instruction]:
    if node.func is functions.Identity:
        return _rounded(node.args[0], codes)
    if node.is_Atom:
        return list(codes[node]) if node in codes else [_atom(node)]
    kind = node.func
    parts = [_code(one, codes) for one in node.args]
    if kind in _SWAPPED:
        return [*parts[1], *parts[0], (_SWAPPED[kind], 0)]
    repeated = _REPEATED.get(kind)
    if node.is_integer or _is_negation(node):  # nothing is rounded in it
        repeated = repeated or _OF_INTEGERS.get(kind)
    if repeated:
        return _chain(parts, repeated)
    if kind is sympy.Abs:
        code = [*parts[0], *parts[0], (INTEGER, -1), ("multiply", 0), ("maximum", 0)]
        # A fraction may be -0.0, which is not less than 0.0.
        return code if node.is_integer else [*code, (REAL, 0.0), ("add", 0)]
    plain = _PLAIN.get(kind)
    if kind is functions.RoundDecimal and not _is_number_of_decimals(node.args[1]):
        plain = None
    if kind is sympy.Pow and node.is_integer and node.exp.is_Integer and node.exp >= 0:
        plain = "power"
    if plain is None:
        raise CaptureError(
            f"a size is computed by {kind.__name__} in {node}, which cannot be repeated exactly "
            "for other sizes: compute it with integers, or outside of the model"
        )
    return [*itertools.chain.from_iterable(parts), (plain, 0)]


def _rounded(node: Any, codes: Codes) -> list[Instruction]:
    """The code of one operation on fractions, kept apart from others (`watched_numbers`)."""
    if node.func is sympy.Pow and node.exp == 2:
        parts = [_code(node.base, codes)] * 2
        return _chain(parts, "multiply")
    n_rounded = sum(1 for one in node.args if one != -1)  # a sign rounds nothing
    if node.func in _OF_INTEGERS and n_rounded <= 2:
        parts = [_code(one, codes) for one in node.args]
        return _chain(parts, _OF_INTEGERS[node.func])
    return _code(node, codes)


def _is_number_of_decimals(node: Any) -> bool:
    return bool(node.is_Integer and 0 <= node <= _MOST_DECIMALS)


def _is_negation(node: Any) -> bool:
    return node.func is sympy.Mul and len(node.args) == 2 and node.args[0] == -1


def _chain(parts: list[list[Instruction]], name: str) -> list[Instruction]:
    code = list(parts[0])
    for part in parts[1:]:
        code += [*part, (name, 0)]
    return code


def _atom(node: Any) -> Instruction:
    if node is sympy.true or node is sympy.false:
        return (INTEGER, int(node is sympy.true))
    if node.is_Integer and abs(int(node)) < _MOST_EXACT:
        return (INTEGER, operator.index(int(node)))
    if node.is_Float:
        return (REAL, float(node))
    raise CaptureError(f"a size depends on {node}, which is none of the sizes that may vary")
