"""Slicing: some launches of a Program as a Program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.errors import ProgramError
from offload.program.bindings import Bindings, BoundProgram
from offload.program.check import check_program
from offload.program.launch import Launch
from offload.program.program import Overlap, Program, Result
from offload.program.rewrite import renumbered
from offload.program.structure import Structure
from offload.program.values import MADE_ROLES, Role, TensorView, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Some launches as a Program that takes what they read, and returns what others read.

    Attributes:
        bound: takes the whole tensors of `inputs` by position, and gives those of `outputs` as a
            tuple. Weights are those of the whole Program.
        inputs: for each argument the Value of the whole Program that it is.
        outputs: likewise for each result: what a launch elsewhere reads, or the caller sees.
        values: for each Value of the slice its index in the whole Program.
        launches: likewise for each launch.
    """

    bound: BoundProgram
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: tuple[int, ...] = ()
    launches: tuple[int, ...] = ()


def slice_program(bound: BoundProgram, launches: Sequence[int]) -> Slice:
    """Cut launches out of a Program, in recorded order.

    What one side makes must not be written on the other: the writes would be lost. Inputs and
    weights are the caller's memory, and may be written wherever they are used.

    Args:
        bound: the whole Program, of launches that were seen.
        launches: their indices, each once, ascending.

    Raises:
        ProgramError: there are no launches, they are out of order, a Value that crosses is written
            on both sides, or is larger than its first tensor; the message says which.
    """
    program = bound.program
    if not launches or list(launches) != sorted(set(launches)) or program.opaque is not None:
        raise ProgramError(f"expected indices of launches in order, each once, got {launches}")
    chosen = [program.launches[index] for index in launches]
    first: dict[int, int] = {}
    for launch in program.launches:
        for value in launch.touched():
            first.setdefault(value, launch.index)
    crossing = _Crossing(program, chosen, first)
    inputs, outputs = crossing.inputs(), crossing.outputs()
    crossing.check(inputs, outputs)
    used = {value for launch in chosen for value in launch.touched()}
    kept = [value for value in program.values if value.index in used]
    positions = {value.index: position for position, value in enumerate(kept)}
    roles = {**dict.fromkeys(inputs, Role.INPUT), **dict.fromkeys(outputs, Role.OUTPUT)}
    whole = {value.index: _whole(value, positions[value.index]) for value in kept}
    sliced = dataclasses.replace(
        program,
        values=tuple(
            dataclasses.replace(
                one, index=positions[one.index], role=_role(one, roles.get(one.index))
            )
            for one in kept
        ),
        launches=tuple(renumbered(one, at, positions) for at, one in enumerate(chosen)),
        inputs=tuple(whole[value] for value in inputs),
        results=tuple(Result(whole[value]) for value in outputs),
        arguments_structure=Structure(
            "tuple",
            (_tensors(len(inputs)), Structure("dict", type_name="builtins.dict", container=dict)),
        ),
        result_structure=_tensors(len(outputs)),
        overlaps=_overlaps(program, inputs),
        weight_views=_weight_views(program, positions),
        parameter_names=(),
        keyword_only_names=(),
        host_reads=(),
    )
    check_program(sliced)
    bindings = _bindings(bound, inputs, positions)
    return Slice(BoundProgram(sliced, bindings), inputs, outputs, tuple(positions), tuple(launches))


@dataclasses.dataclass(frozen=True, slots=True)
class _Crossing:
    """The Values that the chosen launches share with the others."""

    program: Program
    chosen: Sequence[Launch]
    first: Mapping[int, int]  # by Value, the first launch of the Program that touches it

    def inputs(self) -> tuple[int, ...]:
        """The caller's inputs that are used here, then what other launches have made."""
        used = [value for launch in self.chosen for value in launch.touched()]
        own = {view.value: None for view in self.program.inputs if view.value in set(used)}
        made = (value for value in used if self.program.values[value].role in MADE_ROLES)
        return (*own, *dict.fromkeys(value for value in made if self._begins_elsewhere(value)))

    def outputs(self) -> tuple[int, ...]:
        """What begins here, and is used by other launches or seen by the caller."""
        begun = dict.fromkeys(
            value
            for launch in self.chosen
            for value in launch.touched()
            if self.program.values[value].role in MADE_ROLES
        )
        returned = {result.view.value for result in self.program.results}
        here = {launch.index for launch in self.chosen}
        elsewhere = {
            value
            for launch in self.program.launches
            if launch.index not in here
            for value in launch.touched()
        }
        return tuple(
            value
            for value in begun
            if value in (returned | elsewhere) and not self._begins_elsewhere(value)
        )

    def check(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Check that Values that cross are whole, and written on one side only."""
        here = {launch.index for launch in self.chosen}
        written = {value for launch in self.chosen for value in launch.writes}
        for launch in self.program.launches:
            if launch.index in here:
                continue
            for value in launch.writes:
                is_made = self.program.values[value].role in MADE_ROLES
                if value in outputs or (is_made and value in inputs and value in written):
                    raise ProgramError(
                        f"%{value} ({self.program.values[value].name}) is written by launches of "
                        f"both sides, {launch.index} among them: they belong together"
                    )
        for value in (*inputs, *outputs):
            one = self.program.values[value]
            if _whole(one, value).end_bytes != one.size_bytes:
                raise ProgramError(
                    f"%{value} ({one.name}) is larger than its first tensor: launches that use it "
                    "belong with the launch that made it"
                )

    def _begins_elsewhere(self, value: int) -> bool:
        return all(self.first[value] != one.index for one in self.chosen)


def _whole(value: Value, position: int) -> TensorView:
    return TensorView(position, 0, value.shape, value.strides, value.dtype)


def _role(value: Value, role: Role | None) -> Role:
    return value.role if role is None or value.role is Role.WEIGHT else role


def _tensors(count: int) -> Structure:
    leaves = tuple(Structure("tensor", leaf=leaf) for leaf in range(count))
    return Structure("tuple", leaves, type_name="builtins.tuple", container=tuple)


def _overlaps(program: Program, inputs: Sequence[int]) -> tuple[Overlap, ...]:
    """The overlaps of inputs that are both here."""
    leaves = {value: leaf for leaf, value in enumerate(inputs)}
    ends = [
        (leaves.get(program.inputs[one.first].value), leaves.get(program.inputs[one.second].value))
        for one in program.overlaps
    ]
    return tuple(
        Overlap(first, second, one.distance_bytes)
        for one, (first, second) in zip(program.overlaps, ends, strict=True)
        if first is not None and second is not None
    )


def _weight_views(
    program: Program, positions: Mapping[int, int]
) -> dict[int, tuple[TensorView, ...]]:
    return {
        positions[index]: tuple(dataclasses.replace(one, value=positions[index]) for one in views)
        for index, views in program.weight_views.items()
        if index in positions
    }


def _bindings(bound: BoundProgram, inputs: Sequence[int], positions: Mapping[int, int]) -> Bindings:
    """The objects that remain; samples are known only for the caller's inputs."""
    known = dict(
        zip(
            (view.value for view in bound.program.inputs),
            bound.bindings.input_samples,
            strict=False,
        )
    )
    return dataclasses.replace(
        bound.bindings.moved(positions),
        input_samples=tuple(known.get(value, b"") for value in inputs),
        arguments=None,
        results=None,
    )
