"""The numbers of a Program: all that may differ between its recordings at several sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from offload.program.launch import Argument, Launch
from offload.program.program import Program, Result
from offload.program.values import Role, Symbol, TensorView, Value, span_bytes

Convert = Callable[[Any], Any]


def map_numbers(program: Program, convert: Convert) -> Program:
    """The Program with other numbers: sizes, strides, offsets, and numbers that launches are given.

    What follows from others is computed: the bytes of an input, and the offset of a view without
    elements, which is 0.

    Args:
        program: of operators alone.
        convert: is given each number in the order in which they stand, always the same one, and
            gives what stands there instead.
    """
    return dataclasses.replace(
        program,
        values=tuple(_value(one, convert) for one in program.values),
        launches=tuple(_launch(one, convert) for one in program.launches),
        inputs=tuple(_view(one, convert) for one in program.inputs),
        results=tuple(Result(_view(one.view, convert), one.input_leaf) for one in program.results),
    )


def map_numbered(program: Program, convert: Callable[[int, Any], Any]) -> Program:
    """As `map_numbers`, where `convert` is told the place of each number as well."""
    places = itertools.count()
    return map_numbers(program, lambda number: convert(next(places), number))


def numbers_of(program: Program) -> list[Any]:
    """The numbers of a Program, in the order of `map_numbers`."""
    return _kept(map_numbers, program)


def numbers_of_value(value: Value) -> list[Any]:
    """Those that stand in one of its Values."""
    return _kept(_value, value)


def launch_of_number(program: Program, place: int) -> Launch | None:
    """The launch that has a number, or makes the Value which has it.

    Args:
        program: of operators alone.
        place: of the number, in the order of `map_numbers`.
    """
    for value in program.values:
        place -= len(numbers_of_value(value))
        if place < 0:
            makers = (one for one in program.launches if value.index in one.writes)
            return next(makers, None)
    for launch in program.launches:
        place -= len(_kept(_launch, launch))
        if place < 0:
            return launch
    return None


def _kept(map_part: Callable[[Any, Convert], object], part: Any) -> list[Any]:
    found: list[Any] = []

    def keep(number: Any) -> Any:
        found.append(number)
        return number

    map_part(part, keep)
    return found


def _value(old: Value, convert: Convert) -> Value:
    if old.role is Role.WEIGHT:
        return old
    shape, strides = _all(old.shape, convert), _all(old.strides, convert)
    size_bytes = convert(old.size_bytes)
    if old.role is Role.INPUT:
        size_bytes = span_bytes(shape, strides, old.dtype)
    return dataclasses.replace(old, shape=shape, strides=strides, size_bytes=size_bytes)


def _view(old: TensorView, convert: Convert) -> TensorView:
    shape, strides = _all(old.shape, convert), _all(old.strides, convert)
    offset_bytes = convert(old.offset_bytes)
    return dataclasses.replace(
        old, offset_bytes=0 if 0 in shape else offset_bytes, shape=shape, strides=strides
    )


def _all(numbers: tuple[int, ...], convert: Convert) -> tuple[int, ...]:
    return tuple(convert(one) for one in numbers)


def _launch(old: Launch, convert: Convert) -> Launch:
    return dataclasses.replace(
        old,
        arguments=tuple(_argument(one, convert) for one in old.arguments),
        results=tuple(None if one is None else _view(one, convert) for one in old.results),
    )


def _argument(old: Argument, convert: Convert) -> Argument:
    if isinstance(old, TensorView):
        return _view(old, convert)
    if isinstance(old, tuple):
        return tuple(_argument(one, convert) for one in old)
    if old is None or isinstance(old, (bool, str, complex, Symbol)):
        return old
    number: Argument = convert(old)
    return number
