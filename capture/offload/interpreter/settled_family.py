"""A Family prepared for execution, once for all sizes: constants apart, dead launches removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

import torch

from offload.interpreter.size_constants import made_constants
from offload.program import BoundProgram, Launch, Program
from offload.program.dead_launches import remove_dead_launches
from offload.program.family import BoundFamily, Family
from offload.program.folding import fold, folded_values, is_folded
from offload.program.rewrite import renumbered
from offload.program.varying_numbers import varies, varying_program


@dataclasses.dataclass(frozen=True, slots=True)
class SizeConstants:
    """Launches whose results follow from sizes alone.

    Attributes:
        program: these launches and the Values that they use; it has neither inputs nor results.
        results: its Values that others use.
        weights: the holders of its Values that are the same at all sizes.
    """

    program: Program
    results: tuple[int, ...]
    weights: Mapping[int, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class SettledFamily:
    """A Family in executable form.

    Attributes:
        family: the original.
        bound: the Program of an execution at the recorded sizes; its numbers carry their
            expressions. What follows from sizes alone are weights without holders.
        constants: makes these; None if there are none.
        constant_values: the Value in `bound` of each result of `constants`.
    """

    family: Family
    bound: BoundProgram
    constants: SizeConstants | None
    constant_values: tuple[int, ...]

    @property
    def program(self) -> Program:
        """The Program of an execution."""
        return self.bound.program


def settle_family(bound: BoundFamily) -> SettledFamily:
    """Separate what follows from sizes alone from a Family, and drop what is unused.

    What does not depend on sizes either is computed here, and becomes a weight.

    Raises:
        ExecutionError: a launch that makes a constant failed.
    """
    family, program = bound.family, varying_program(bound.family)
    folded = folded_values(program, family.foldable)
    changing = folded & _varying_values(program)
    same = folded - changing
    made = made_constants(BoundProgram(program, bound.bindings), family.foldable) if same else {}
    held = {**bound.bindings.weights, **{index: (made[index],) for index in same}}
    without = fold(program, folded)
    alive = remove_dead_launches(without.program)
    positions = {
        old: alive.positions[new]
        for old, new in without.positions.items()
        if new in alive.positions
    }
    bindings = dataclasses.replace(bound.bindings, weights=held).moved(positions)
    results = tuple(sorted(changing & positions.keys()))
    return SettledFamily(
        family,
        BoundProgram(alive.program, bindings),
        _constants(program, changing, results, held) if results else None,
        tuple(positions[one] for one in results),
    )


def _varying_values(program: Program) -> frozenset[int]:
    """The Values made by launches whose size or content depends on sizes."""
    varying: set[int] = set()
    for launch in program.launches:
        if varies(launch, program.values) or varying.intersection(launch.reads):
            varying.update(launch.writes)
    return frozenset(varying)


def _constants(
    program: Program,
    changing: Set[int],
    results: Sequence[int],
    held: Mapping[int, tuple[torch.Tensor, ...]],
) -> SizeConstants:
    """The launches that make these Values, as a separate Program."""
    part, positions = part_of(program, _makers(program, changing, held.keys()))
    return SizeConstants(
        part,
        results=tuple(positions[one] for one in results),
        weights={positions[index]: held[index][0] for index in positions if index in held},
    )


def part_of(
    program: Program, launches: Sequence[Launch], *, also: Set[int] = frozenset()
) -> tuple[Program, dict[int, int]]:
    """Some launches and the Values that they use as a Program without inputs and results.

    Args:
        program: of the launches.
        launches: in its order.
        also: further Values to include.

    Returns:
        The Program, and the positions of its Values there.
    """
    used = sorted({index for one in launches for index in (*one.reads, *one.writes)} | also)
    positions = {index: position for position, index in enumerate(used)}
    part = dataclasses.replace(
        program,
        values=tuple(
            dataclasses.replace(program.values[index], index=position)
            for position, index in enumerate(used)
        ),
        launches=tuple(renumbered(one, at, positions) for at, one in enumerate(launches)),
        inputs=(),
        results=(),
        weight_views={},
    )
    return part, positions


def _makers(program: Program, changing: Set[int], held: Set[int]) -> list[Launch]:
    """The launches that make these Values, and everything that they are made from.

    Some of the latter is not folded, as it is returned or written later: it is made twice.
    """
    missing: set[int] = set()
    found = []
    for launch in reversed(program.launches):
        made = {view.value for view in launch.made()}
        if is_folded(launch, changing) or missing & made:
            found.append(launch)
            missing |= set(launch.reads) - held
    return found[::-1]
