"""Families as JSON data: what a file holds besides their Program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.errors import BindingError, ProgramError
from offload.program.expressions import INTEGER, REAL, SIZE, Expression, Instruction, expressions
from offload.program.family import Dim, Family, SizeGuard, SizePlace, constants_of
from offload.program.numbers import numbers_of
from offload.program.program import Program
from offload.program.reader import MAXIMUM_INTEGER, Node

_WITH_NUMBER = (INTEGER, REAL, SIZE)


def encode_family(family: Family) -> dict[str, Any]:
    """Return everything in a Family but its Program."""
    return {
        "dims": [
            {
                "name": one.name,
                "minimum": one.minimum,
                "maximum": one.maximum,
                "recorded": one.recorded,
            }
            for one in family.dims
        ],
        "places": [
            {"dim": one.dim, "leaf": one.leaf, "axis": one.axis, "constant": one.constant}
            for one in family.places
        ],
        "foldable": sorted(family.foldable),
        "expressions": [_code(one) for one in family.expressions],
        "varying": _pairs(family.varying),
        "arguments": _pairs(family.arguments),
        "results": _pairs(family.results),
        "guards": [
            {"condition": _code(one.condition), "place": one.place} for one in family.guards
        ],
        "compared": [list(sizes) for sizes in family.compared],
    }


def _code(expression: Expression) -> list[list[Any]]:
    return [[name, number] if name in _WITH_NUMBER else [name] for name, number in expression.code]


def _pairs(varying: Mapping[int, int]) -> list[list[int]]:
    return [list(pair) for pair in varying.items()]


def decode_family(node: Node, program: Program) -> Family:
    """Read what `encode_family` wrote.

    Args:
        node: the data, untrusted.
        program: of the Family, checked by `check_file_program`.

    Raises:
        ProgramError: the data is not a Family of this Program.
    """
    dims, places, foldable, codes, varying, arguments, results, guards, compared = node.fields(
        "dims", "places", "foldable", "expressions", "varying", "arguments", "results", "guards",
        "compared",
    )  # fmt: skip
    family = Family(
        dims=dims.each(_dim),
        places=places.each(_place),
        program=program,
        foldable=frozenset(foldable.integers()),
        expressions=codes.each(_expression),
        varying=_mapping(varying),
        arguments=_mapping(arguments),
        results=_mapping(results),
        guards=guards.each(_guard),
        compared=compared.each(Node.integers),
    )
    _check(family, node)
    return family


def _dim(node: Node) -> Dim:
    name, minimum, maximum, recorded = node.fields("name", "minimum", "maximum", "recorded")
    greatest = None if maximum.value is None else maximum.integer()
    return Dim(name.text(), minimum.integer(), greatest, recorded.integer())


def _place(node: Node) -> SizePlace:
    dim, leaf, axis, constant = node.fields("dim", "leaf", "axis", "constant")
    return SizePlace(dim.integer(), leaf.integer(-1), axis.integer(-1), constant.integer(-1))


def _expression(node: Node) -> Expression:
    return Expression(node.each(_instruction))


def _instruction(node: Node) -> Instruction:
    name, *numbers = node.items() or [node]
    operation = name.text()
    if len(numbers) != (operation in _WITH_NUMBER):
        node.fail("an operation with its number, if it has one")
    if not numbers:
        return (operation, 0)
    if operation == REAL:
        if type(numbers[0].value) is not float:
            numbers[0].fail("a fraction")
        return (operation, numbers[0].value)
    return (operation, numbers[0].integer(-MAXIMUM_INTEGER))


def _mapping(node: Node) -> dict[int, int]:
    pairs = [one.integers() for one in node.items()]
    if any(len(pair) != 2 for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        node.fail("pairs of a place, each once, and an expression")
    return {pair[0]: pair[1] for pair in pairs}


def _guard(node: Node) -> SizeGuard:
    condition, place = node.fields("condition", "place")
    return SizeGuard(_expression(condition), place.text())


def _check(family: Family, node: Node) -> None:
    """Check consistency of the parts; numbers are checked at each choice of sizes.

    Raises:
        ProgramError: the parts do not fit one another.
    """
    program, n_dims = family.program, len(family.dims)
    n_inputs = len(program.inputs)
    counts = (
        (family.varying, len(numbers_of(program))),
        (family.arguments, len(constants_of(program.arguments_structure))),
        (family.results, len(constants_of(program.result_structure))),
    )
    placed = {one.dim for one in family.places}
    holds = (
        len(set(family.names)) == n_dims > 0
        and placed == set(range(n_dims))
        and all(_is_place(one, program, n_inputs) for one in family.places)
        and all(one < len(program.launches) for one in family.foldable)
        and all(
            place < count and index < len(family.expressions)
            for varying, count in counts
            for place, index in varying.items()
        )
        and all(len(sizes) == n_dims for sizes in family.compared)
        and not program.overlaps
    )
    if not holds:
        node.fail("a family whose parts fit one another and the program")
    try:
        expressions(n_dims, family.expressions)
        expressions(n_dims, [one.condition for one in family.guards])
        is_same = family.whole_at(family.checked(family.recorded_sizes)) == program
    except BindingError as error:
        raise ProgramError(f"{node.where}: {error}") from None
    if not is_same:
        node.fail("a family that gives the program at the recorded sizes")


def _is_place(place: SizePlace, program: Program, n_inputs: int) -> bool:
    if place.constant >= 0:
        numbers = constants_of(program.arguments_structure)
        return place.constant < len(numbers) and type(numbers[place.constant]) is int
    return 0 <= place.leaf < n_inputs and 0 <= place.axis < len(program.inputs[place.leaf].shape)
