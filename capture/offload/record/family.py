"""From two recordings of one call, for real and over symbolic sizes, to a Family.

Both must agree. A use of a size that torch cannot follow (`type(n) is int`, a size as a key) shows
as a difference at the recorded sizes, or at other sizes, at which the call is recorded once more
(`check_family`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import BindingError, CaptureError
from offload.native import _planner
from offload.program import (
    Launch,
    Program,
    Role,
    Symbol,
    TensorView,
    Value,
    plain_structure,
    rewrite,
    used_strides,
)
from offload.program.expressions import REAL, Expression, expressions
from offload.program.family import (
    BoundFamily,
    Dim,
    Family,
    SizeGuard,
    SizePlace,
    constants_of,
    with_constants,
)
from offload.program.numbers import (
    launch_of_number,
    map_numbers,
    numbers_of,
    numbers_of_value,
)
from offload.program.structure import Structure
from offload.record.hidden_sizes import hides_size
from offload.record.size_expressions import to_expression
from offload.record.symbolic_sizes import SymbolicSizes
from offload.record.whole_program import WholeProgram

_MOST_SIZES = 500
# Operations about whose results torch knows too little to solve equations.
_UNSOLVED = (
    REAL, "true_divide", "square_root", "logarithm", "to_real", "exponential", "binary_logarithm",
    "sine", "cosine", "round_decimals", "greatest_divisor", "least_multiple",
)  # fmt: skip


class _Numbers:
    """The expressions of the numbers that vary, each once."""

    def __init__(self, sizes: SymbolicSizes) -> None:
        self.expressions: dict[Expression, int] = {}
        self._sizes = sizes
        self._codes = sizes.codes

    def index_of(self, number: Any) -> int:
        expression = to_expression(self._sizes.expression_of(number), self._codes)
        return self.expressions.setdefault(expression, len(self.expressions))

    def varying(self, numbers: Sequence[Any], program: Program | None = None) -> dict[int, int]:
        """The expression of each number that varies, by its place.

        Args:
            numbers: numbers that may vary.
            program: the Program of these numbers; None: they are of arguments or results.

        Raises:
            CaptureError: a number cannot be repeated; the message names the user's line.
        """
        found = {}
        for place, number in enumerate(numbers):
            is_symbolic = isinstance(number, (torch.SymInt, torch.SymFloat))
            if not is_symbolic or not self._sizes.expression_of(number).free_symbols:
                continue
            try:
                found[place] = self.index_of(number)
            except CaptureError as error:
                launch = None if program is None else launch_of_number(program, place)
                raise (error if launch is None else _located(launch.source, error)) from None
        return found


def _located(place: str, error: CaptureError) -> CaptureError:
    return CaptureError(f"{place}: {error}") if place else error


def family_of(
    real: WholeProgram,
    symbolic: WholeProgram,
    sizes: SymbolicSizes,
    places: Sequence[SizePlace],
) -> Family:
    """The Family of a call that was recorded twice.

    Args:
        real: the recording of the call.
        symbolic: its recording over these sizes.
        sizes: the sizes that may vary.
        places: where a call gives them.

    Raises:
        CaptureError: the call differs when sizes may vary; a size may not vary, as the model
            requires the recorded one; a number depends on sizes in a way that cannot be repeated;
            or the inputs overlap.
    """
    if real.program.overlaps:
        raise CaptureError(
            "inputs share memory that the call writes, and sizes may vary: pass copies"
        )
    symbolic = dataclasses.replace(symbolic, results=_with_answers(symbolic.results))
    guards = _guards(sizes)
    for constant in constants_of(symbolic.results):
        if hides_size(constant):
            raise CaptureError(
                f"the call returns a {type(constant).__qualname__} that holds a size that varies, "
                "and a replay would return the recorded size: return the size itself, in a list, "
                "a tuple or a dict"
            )
    numbers = _Numbers(sizes)
    found = dataclasses.replace(symbolic, program=_at_recorded(symbolic, sizes))
    with sizes.deciding():
        varying = numbers.varying(numbers_of(symbolic.program), symbolic.program)
    arguments = numbers.varying(constants_of(symbolic.arguments))
    results = numbers.varying(constants_of(symbolic.results))
    family = Family(
        dims=tuple(sizes.dims),
        places=tuple(places),
        program=_without_slack(real.program, found.program),
        foldable=real.foldable,
        expressions=tuple(numbers.expressions),
        varying=varying,
        guards=guards,
        arguments=arguments,
        results=results,
    )
    _check_same(family, found)
    return family


def _without_slack(real: Program, found: Program) -> Program:
    """The recorded Program without allocated bytes that no tensor shows.

    Some operators shrink their result after computing it (`mse_loss`, `col2im`, `_embedding_bag`);
    their rules for fake tensors do not.
    """
    shown_bytes = [0] * len(real.values)
    for view in [
        *itertools.chain.from_iterable((*one.views(), *one.made()) for one in real.launches),
        *(one.view for one in real.results),
    ]:
        shown_bytes[view.value] = max(shown_bytes[view.value], view.end_bytes)
    values = list(real.values)
    for one, other in zip(real.values, found.values, strict=False):
        is_made = one.role in (Role.ACTIVATION, Role.OUTPUT)
        if is_made and shown_bytes[one.index] <= other.size_bytes < one.size_bytes:
            values[one.index] = dataclasses.replace(one, size_bytes=other.size_bytes)
    return dataclasses.replace(real, values=tuple(values))


def _with_answers(results: Structure) -> Structure:
    """The nesting with questions about sizes answered, and guarded."""
    asked = enumerate(constants_of(results))
    return with_constants(
        results, {place: bool(one) for place, one in asked if isinstance(one, torch.SymBool)}
    )


def without_unused(bound: BoundFamily) -> BoundFamily:
    """The Family without Values that its recordings met and no launch uses."""
    family = bound.family
    whole = family.program
    rewritten = rewrite(whole, whole.launches)
    kept: list[int] = []
    position = 0
    for value in whole.values:
        n_numbers = len(numbers_of_value(value))
        if value.index in rewritten.positions:
            kept += range(position, position + n_numbers)
        position += n_numbers
    kept += range(position, len(numbers_of(whole)))
    varying = {
        place: family.varying[old] for place, old in enumerate(kept) if old in family.varying
    }
    return BoundFamily(
        dataclasses.replace(family, program=rewritten.program, varying=varying),
        bound.bindings.moved(rewritten.positions),
    )


def _guards(sizes: SymbolicSizes) -> tuple[SizeGuard, ...]:
    guards = []
    for condition, place in sizes.guards():
        try:
            guard = SizeGuard(to_expression(condition, sizes.codes), place)
        except CaptureError as error:
            raise _located(place, error) from None
        if guard not in guards:
            guards.append(guard)
    names = [one.name for one in sizes.dims]
    for symbol, at in sizes.positions.items():
        fixed = sizes.fixed(symbol)
        if fixed is not None:
            place = next(
                (one.place for one in guards if one.condition.dims == {at} and one.place), ""
            )
            raise _may_not_vary(names[at], fixed, place)
        pinned = _pinned(guards, at, sizes.dims[at], len(names))
        if pinned is not None:
            raise _may_not_vary(names[at], sizes.dims[at].recorded, pinned.place)
    return tuple(guards)


def _may_not_vary(name: str, size: int, place: str) -> CaptureError:
    return CaptureError(
        f"{name} may not vary: the call needs it to be {size}{f' ({place})' if place else ''}, as "
        "when a size is made a Python number or text, or compared with the recorded one. Instead "
        "of int(a), float(n) and x[list(range(n))] write torch.sym_int(a), torch.sym_float(n) and "
        "x[torch.arange(n)]; a loop over range(n) or len(x) makes other launches at each size; a "
        "size of 1 or 0 often takes another path, so record a larger one. Otherwise leave the Dim "
        "out, and capture the model for each size"
    )


def _pinned(guards: Sequence[SizeGuard], at: int, dim: Dim, n_dims: int) -> SizeGuard | None:
    """A guard that only the recorded size of a Dim fulfils, such as that of `int(n * 0.5)`.

    torch notices guards that are equations of integers in functions that it knows. In wide ranges,
    sizes near the recorded one and near the least are tested.
    """
    if dim.minimum == dim.maximum:
        return None
    most = dim.recorded + _MOST_SIZES if dim.maximum is None else dim.maximum
    ranges = (
        range(dim.minimum, min(most, dim.minimum + _MOST_SIZES) + 1),
        range(max(dim.minimum, dim.recorded - _MOST_SIZES), dim.recorded),
        range(dim.recorded + 1, min(most, dim.recorded + _MOST_SIZES) + 1),
    )
    for guard in guards:
        code = guard.condition.code
        is_unsolved = any(operation in _UNSOLVED for operation, _ in code)
        if guard.condition.dims != {at} or code[-1][0] != "equal" or not is_unsolved:
            continue
        condition = expressions(n_dims, [guard.condition])
        others = (size for sizes in ranges for size in sizes if size != dim.recorded)
        if not any(_holds(condition, [size] * n_dims) for size in others):
            return guard
    return None


def _holds(condition: _planner.Expressions, sizes: Sequence[int]) -> bool:
    try:
        return bool(condition.evaluate(0, sizes))
    except BindingError:
        return False


def _check_same(family: Family, found: WholeProgram) -> None:
    """Refuse a Family that at the recorded sizes differs from the recording over sizes.

    Raises:
        CaptureError: it differs.
    """
    recorded = [one.recorded for one in family.dims]
    # Numbers stand at the same places only where both Programs have the same ones.
    difference = difference_of(family, found, family.program) or difference_of(
        family, found, family.whole_at(recorded)
    )
    if difference:
        raise CaptureError(
            "the call behaves differently where its sizes may vary than where they are Python "
            f"numbers: {difference}; look for type(n) and sizes as keys"
        )


def _at_recorded(symbolic: WholeProgram, sizes: SymbolicSizes) -> Program:
    """The Program recorded over sizes, evaluated at the recorded sizes."""
    with sizes.deciding():
        program = map_numbers(symbolic.program, sizes.recorded)
    constants = dict(enumerate(map(sizes.recorded, constants_of(symbolic.results))))
    results = plain_structure(with_constants(symbolic.results, constants))
    return dataclasses.replace(program, result_structure=results)


def check_family(family: Family, sizes: Sequence[int], seen: WholeProgram) -> None:
    """Refuse a Family that differs from a recording at these sizes.

    Raises:
        CaptureError: it differs, or one of its numbers has no result there.
    """
    try:
        expected = family.whole_at(sizes)
    except BindingError as error:
        raise CaptureError(f"the call cannot be repeated: {error}: declare a smaller Dim") from None
    text = ", ".join(f"{n} = {size}" for n, size in zip(family.names, sizes, strict=True))
    difference = difference_of(family, seen, expected)
    if difference:
        raise CaptureError(
            f"the call behaves differently at {text}, which no comparison of its sizes explains: "
            f"{difference}; look for type(n) and sizes as keys, and for state that the call keeps "
            "in Python; or declare a smaller Dim"
        )


def difference_of(family: Family, seen: WholeProgram, expected: Program) -> str:
    """How a recording differs from a Program of a Family; empty if it does not."""
    found = seen.program
    pairs: list[tuple[Launch, Launch] | tuple[Value, Value]] = [
        *zip(expected.launches, found.launches, strict=False),
        *zip(expected.values, found.values, strict=False),
    ]
    differing = (f"{other} in place of {one}" for one, other in pairs if not _same(one, other))
    results = [one.view for one in expected.results], [one.view for one in found.results]
    checks = (
        (len(expected.launches) == len(found.launches), "it makes another number of launches"),
        (len(expected.values) == len(found.values), "it makes another number of tensors"),
        (seen.foldable == family.foldable, "other launches make constants"),
        (_same(expected.inputs, found.inputs), "its inputs have another layout"),
        (_same(*results), "its results have another layout"),
        (not found.overlaps and _nesting(found) == _nesting(expected), "its result differs"),
    )
    return next(differing, "") or next((what for holds, what in checks if not holds), "")


def _same(one: Any, other: Any) -> bool:
    return bool(_comparable(one) == _comparable(other))


def _nesting(program: Program) -> tuple[Any, ...]:
    """The nesting of arguments and results; constants that may vary are compared as numbers."""
    return (
        program.arguments_structure,
        program.result_structure,
        [one for one in constants_of(program.result_structure) if not isinstance(one, Symbol)],
    )


def _comparable(one: Any) -> Any:
    """The parts that must be equal: all but strides that are never used."""
    if isinstance(one, (TensorView, Value)):
        strides = used_strides(one.shape, one.strides)
        return dataclasses.replace(one, strides=strides)
    if isinstance(one, Launch):
        return dataclasses.replace(
            one, arguments=_comparable(one.arguments), results=_comparable(one.results)
        )
    if isinstance(one, (tuple, list)):
        return tuple(map(_comparable, one))
    return one
