"""Numbers that carry the expression by which they vary through every rewrite of a Program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from offload.program.family import Family
from offload.program.launch import Launch
from offload.program.numbers import map_numbered
from offload.program.program import Program
from offload.program.values import TensorView, Value

Varying = list[tuple[int, int]]
"""The numbers of a view that vary: position and expression.

Positions count its sizes, then its strides; the last is its offset.
"""


class VaryingInteger(int):
    """An integer at the recorded sizes, given by one of a Family's expressions."""

    expression: int


class VaryingReal(float):
    """A real number at the recorded sizes, given by one of a Family's expressions."""

    expression: int


def varying_program(family: Family) -> Program:
    """The whole Program at the recorded sizes, with numbers that carry their expressions."""

    def tagged(place: int, number: Any) -> Any:
        expression = family.varying.get(place)
        if expression is None:
            return number
        kind = VaryingInteger if isinstance(number, int) else VaryingReal
        varying = kind(number)
        varying.expression = expression
        return varying

    return map_numbered(family.program, tagged)


def expression_of(number: Any) -> int | None:
    """The expression of a number; None if it is constant."""
    return getattr(number, "expression", None)


def varying_of(view: TensorView) -> Varying:
    """The numbers of a view that vary."""
    return _with_expressions((*view.shape, *view.strides, view.offset_bytes))


def _with_expressions(numbers: Sequence[Any]) -> Varying:
    return [
        (position, expression)
        for position, expression in enumerate(map(expression_of, numbers))
        if expression is not None
    ]


def varies(launch: Launch, values: Sequence[Value]) -> bool:
    """Whether an operand or result of a launch has a number that varies."""
    made = [values[view.value].size_bytes for view in launch.made()]
    views = [*launch.views(), *launch.made()]
    numbers = [number for _, number in scalars(launch.arguments)]
    return any(map(varying_of, views)) or any(
        expression_of(one) is not None for one in (*made, *numbers)
    )


def values_bytes(program: Program) -> list[tuple[str, int]]:
    """The bytes of each Value, for the native side: fixed, by an expression, or of an input."""
    leaves = {view.value: leaf for leaf, view in enumerate(program.inputs)}
    found: list[tuple[str, int]] = []
    for value in program.values:
        expression = expression_of(value.size_bytes)
        if value.index in leaves:
            found.append(("input", leaves[value.index]))
        elif expression is not None:
            found.append(("expression", expression))
        else:
            found.append(("fixed", value.size_bytes))
    return found


def scalars(arguments: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The numbers among a launch's arguments, with the path to each."""
    for at, argument in enumerate(arguments):
        if isinstance(argument, tuple):
            for path, number in scalars(argument):
                yield (at, *path), number
        elif isinstance(argument, (int, float)) and not isinstance(argument, bool):
            yield (at,), argument
