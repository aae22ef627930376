"""Families: Programs whose sizes may vary, and the Program for each choice of sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from offload.console.amounts import show_count
from offload.errors import BindingError, ProgramError
from offload.native import _planner
from offload.program.bindings import Bindings, BoundProgram
from offload.program.check import check_program
from offload.program.expressions import Expression, expressions
from offload.program.folding import folded_values, settle
from offload.program.numbers import map_numbered
from offload.program.program import Program
from offload.program.structure import Structure

MOST = 2**62
"""Stands for a size without a maximum; no size may be larger."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """A size that may vary.

    Attributes:
        name: identifies it, in messages and when sizes are chosen.
        minimum, maximum: its least and greatest value; None: no maximum.
        recorded: its value in the recorded call.
    """

    name: str
    minimum: int
    maximum: int | None
    recorded: int

    def __str__(self) -> str:
        most = "" if self.maximum is None else f" <= {self.maximum}"
        return f"{self.minimum} <= {self.name}{most} (recorded at {self.recorded})"


@dataclasses.dataclass(frozen=True, slots=True)
class SizePlace:
    """Where a call gives the size of a Dim.

    Attributes:
        dim: its position.
        leaf: the input that has it.
        axis: of that input.
        constant: for an integer argument, its position among the constants of the arguments; then
            there is no input.
    """

    dim: int
    leaf: int = -1
    axis: int = -1
    constant: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class SizeGuard:
    """A condition on sizes that held in the recorded call, and must hold in all others.

    Attributes:
        condition: not 0 where it holds.
        place: the user's `file:line` that asked for it; empty if no user code did.
    """

    condition: Expression
    place: str


@dataclasses.dataclass(frozen=True)
class Family:
    """A Program whose sizes may vary: recorded once, and evaluated for any sizes that fit.

    Attributes:
        dims: the sizes that may vary.
        places: where a call gives them; each Dim has at least one.
        program: the whole recorded call, with the launches that make constants.
        foldable: its launches that make constants if all their operands are constants.
        expressions: the numbers that vary.
        varying: the expression of each number of `program` that varies, by its position in the
            order of `map_numbers`.
        arguments, results: likewise for integers among the constants of the arguments and of the
            result, by their position among these.
        guards: conditions on sizes.
        compared: sizes, in the order of the Dims, at which guards need not hold: another recording
            at these sizes equals the Family.
    """

    dims: tuple[Dim, ...]
    places: tuple[SizePlace, ...]
    program: Program
    foldable: frozenset[int]
    expressions: tuple[Expression, ...]
    varying: Mapping[int, int]
    guards: tuple[SizeGuard, ...]
    arguments: Mapping[int, int] = dataclasses.field(default_factory=dict)
    results: Mapping[int, int] = dataclasses.field(default_factory=dict)
    compared: tuple[tuple[int, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the Dims, in order."""
        return tuple(one.name for one in self.dims)

    @property
    def recorded_sizes(self) -> dict[str, int]:
        """The sizes of the recorded call."""
        return {one.name: one.recorded for one in self.dims}

    @property
    def n_numbers(self) -> int:
        """The number of numbers that vary."""
        return len(self.varying) + len(self.arguments) + len(self.results)

    def at(self, sizes: Mapping[str, int]) -> Program:
        """The Program at these sizes: what `capture` would record of such a call.

        Args:
            sizes: for each Dim, by name.

        Raises:
            BindingError: a Dim is missing or unknown, a size is out of range, or a guard does not
                hold; the message names the Dim, the sizes and the user's line.
        """
        whole = self.whole_at(self.checked(sizes))
        return settle(whole, folded_values(whole, self.foldable)).program

    def whole_at(self, sizes: Sequence[int]) -> Program:
        """The whole Program of a call with these sizes, with the launches that make constants.

        Args:
            sizes: in the order of the Dims, accepted by `checked`.

        Raises:
            BindingError: a number has no result at these sizes.
            ProgramError: the numbers contradict each other.
        """
        return self.evaluated(sizes)[0]

    def evaluated(self, sizes: Sequence[int]) -> tuple[Program, Sequence[int | float]]:
        """Return the Program of `whole_at`, and the numbers that vary, by expression."""
        found = self.numbers_at(sizes)

        def convert(place: int, number: Any) -> Any:
            index = self.varying.get(place)
            if index is None:
                return number
            if type(found[index]) is not type(number):
                raise ProgramError(
                    f"number {place} is {found[index]!r}: expected a {type(number).__name__}"
                )
            return found[index]

        program = map_numbered(self.program, convert)
        arguments = self.arguments_at(program.arguments_structure, found)
        results = self.results_at(program.result_structure, found)
        program = dataclasses.replace(
            program, arguments_structure=arguments, result_structure=results
        )
        check_program(program)
        return program, found

    def numbers_at(self, sizes: Sequence[int]) -> Sequence[int | float]:
        """Evaluate `expressions`.

        Args:
            sizes: as for `whole_at`.

        Raises:
            BindingError: an expression has no result at these sizes.
        """
        try:
            return self._numbers.evaluate_all(list(sizes))
        except BindingError as error:
            raise BindingError(f"{self._at_text(sizes)}: {error}; expected smaller sizes") from None

    def arguments_at(self, arguments: Structure, numbers: Sequence[int | float]) -> Structure:
        """The nesting of a call's arguments, with varying integers taken from `numbers`."""
        return with_constants(arguments, _chosen(self.arguments, numbers))

    def results_at(self, results: Structure, numbers: Sequence[int | float]) -> Structure:
        """The nesting of its result, likewise."""
        return with_constants(results, _chosen(self.results, numbers))

    def checked(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes in the order of the Dims, if the Family may be used with them.

        Raises:
            BindingError: as `at`.
        """
        if unknown := set(sizes).symmetric_difference(self.names):
            raise BindingError(
                f"expected a size for each of {', '.join(self.names)}, got {dict(sizes)}: "
                f"{min(unknown)} is missing, or is not a Dim"
            )
        ordered = tuple(sizes[name] for name in self.names)
        for dim, size in zip(self.dims, ordered, strict=True):
            if isinstance(size, bool) or not isinstance(size, int):
                raise BindingError(f"{dim.name}: expected a whole number, got {size!r}")
            if size < dim.minimum or (dim.maximum is not None and size > dim.maximum):
                raise BindingError(f"expected {dim}, got {size}: capture with a wider Dim")
            if size > MOST:
                raise BindingError(f"{dim.name}: expected at most {MOST}, got {size}")
        if ordered not in self.compared:
            self._check_guards(ordered)
        return ordered

    def _check_guards(self, sizes: tuple[int, ...]) -> None:
        for guard, number in zip(self.guards, range(len(self.guards)), strict=True):
            try:
                holds = self._conditions.evaluate(number, sizes)
            except BindingError as error:
                raise BindingError(f"{self._at_text(sizes)}: {error}") from None
            if not holds:
                at = f" (asked at {guard.place})" if guard.place else ""
                raise BindingError(
                    f"{self._at_text(sizes)}: expected {guard.condition.text(self.names)}, as it "
                    f"was when the call was recorded{at}: another path of the model may be taken. "
                    "Capture it again with such sizes"
                )

    def _at_text(self, sizes: Sequence[int]) -> str:
        return ", ".join(f"{n} = {size}" for n, size in zip(self.names, sizes, strict=True))

    @functools.cached_property
    def _numbers(self) -> _planner.Expressions:
        return expressions(len(self.dims), self.expressions)

    @functools.cached_property
    def _conditions(self) -> _planner.Expressions:
        return expressions(len(self.dims), [one.condition for one in self.guards])

    def __str__(self) -> str:
        lines = [
            f"family of {show_count(len(self.program.launches), 'launch', 'launches')}, "
            f"{show_count(self.n_numbers, 'number')} of which vary by "
            f"{show_count(len(self.expressions), 'expression')}"
        ]
        lines += [f"  dim {one}" for one in self.dims]
        lines += [
            f"  guard {one.condition.text(self.names)}" + (f"  # {one.place}" if one.place else "")
            for one in self.guards
        ]
        lines += [f"  compared at {self._at_text(one)}" for one in self.compared]
        lines += [f"  size {text}" for text in dict.fromkeys(self._texts())]
        return "\n".join(lines)

    def _texts(self) -> list[str]:
        return [one.text(self.names) for one in self.expressions if len(one.code) > 1]


@dataclasses.dataclass(frozen=True, slots=True)
class BoundFamily:
    """A Family with the live objects of its `program`."""

    family: Family
    bindings: Bindings

    def whole_at(self, sizes: Sequence[int]) -> BoundProgram:
        """The whole Program of these sizes, as `Family.whole_at`, with its live objects.

        Raises:
            BindingError: a number has no result at these sizes.
        """
        family, bindings = self.family, self.bindings
        whole, found = family.evaluated(sizes)
        arguments, results = bindings.arguments, bindings.results
        if arguments is not None:
            arguments = family.arguments_at(arguments, found)
        if results is not None:
            results = family.results_at(results, found)
        return BoundProgram(
            whole, dataclasses.replace(bindings, arguments=arguments, results=results)
        )


def constants_of(structure: Structure) -> list[Any]:
    """The constants of a nesting, in order."""
    if structure.kind == "constant":
        return [structure.constant]
    return [one for child in structure.children for one in constants_of(child)]


def _chosen(varying: Mapping[int, int], found: Sequence[Any]) -> dict[int, Any]:
    return {place: found[index] for place, index in varying.items()}


def with_constants(structure: Structure, numbers: Mapping[int, Any]) -> Structure:
    """The nesting with other constants at some positions, in the order of `constants_of`."""
    if not numbers:
        return structure
    position = -1

    def replaced(node: Structure) -> Structure:
        nonlocal position
        if node.kind == "constant":
            position += 1
            constant = numbers.get(position, node.constant)
            return dataclasses.replace(node, constant=constant)
        return dataclasses.replace(node, children=tuple(map(replaced, node.children)))

    return replaced(structure)
