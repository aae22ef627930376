"""Rewriting: from a Program to one that computes the same."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

from offload.errors import ProgramError
from offload.program.check import check_program
from offload.program.launch import Argument, Launch
from offload.program.program import Program, Result
from offload.program.values import Role, TensorView, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten Program.

    Attributes:
        program: the new Program.
        positions: for each given Value that remains, its new index.
    """

    program: Program
    positions: Mapping[int, int]


def rewrite(
    program: Program,
    launches: Sequence[Launch],
    values: Sequence[Value] | None = None,
    weight_views: Mapping[int, tuple[TensorView, ...]] | None = None,
) -> Rewritten:
    """Replace the launches of a Program, and drop unused Values.

    Maps every field that holds an index of a Value or a launch; `Bindings.moved` does the same for
    the Bindings. Inputs and host constants stay even if unused: what the recording computed from
    host constants is valid only while they are unchanged.

    Args:
        program: the Program to rewrite.
        launches: in execution order; they name Values by their index in `values`, and their own
            index is ignored.
        values: those of the Program, with other roles or with Values appended; None: unchanged.
        weight_views: of all weights; None: those of the Program.

    Raises:
        ProgramError: the new launches are not a valid Program, as with a Value that is used before
            it is made, or a view that reaches beyond its Value; the message says where.
    """
    values = program.values if values is None else tuple(values)
    weight_views = program.weight_views if weight_views is None else weight_views
    used = _used(program, launches, values)
    if unknown := used - {value.index for value in values}:
        raise ProgramError(
            f"the new launches name %{min(unknown)}, and there are {len(values)} values: append it"
        )
    kept = [value for value in values if value.index in used]
    positions = {value.index: position for position, value in enumerate(kept)}
    is_same = _are_same(launches, program.launches) and _are_same(kept, program.values)
    if is_same and weight_views == program.weight_views:
        return Rewritten(program, positions)
    moved = _Moved(positions)
    rewritten = dataclasses.replace(
        program,
        values=tuple(moved.value(value) for value in kept),
        launches=tuple(moved.launch(at, launch) for at, launch in enumerate(launches)),
        inputs=tuple(moved.view(one) for one in program.inputs),
        results=tuple(Result(moved.view(one.view), one.input_leaf) for one in program.results),
        weight_views={
            positions[index]: tuple(moved.view(one) for one in views)
            for index, views in weight_views.items()
            if index in positions
        },
    )
    check_program(rewritten)
    _check_content(program, launches, values)
    return Rewritten(rewritten, positions)


def renumbered(launch: Launch, index: int, positions: Mapping[int, int]) -> Launch:
    """The launch at another index, over Values at other positions."""
    return _Moved(positions).launch(index, launch)


def _used(program: Program, launches: Sequence[Launch], values: Sequence[Value]) -> set[int]:
    used = {view.value for view in program.inputs}
    used |= {result.view.value for result in program.results}
    for launch in launches:
        used.update(launch.reads, launch.writes)
        used.update(view.value for view in launch.views())
    return used | {one.index for one in values if one.role is Role.WEIGHT and one.on_host}


def _check_content(program: Program, launches: Sequence[Launch], values: Sequence[Value]) -> None:
    """Check that every Value that is used still gets its content.

    A Value that an old launch made must be made by a new one, and a Value that was written (memory
    that began without content) must be written, each before another launch uses it.
    """
    made, written = _given_content(program.launches)
    made |= {value.index for value in values[len(program.values) :]}
    made_now: set[int] = set()
    written_now: set[int] = set()
    for position, launch in enumerate(launches):
        written_now.update(launch.writes)
        lost = ({*launch.reads} & made - made_now) | ({*launch.reads} & written - written_now)
        lost -= {view.value for view in launch.made()}
        _refuse_lost(lost, values, f"launches[{position}] uses")
        made_now.update(view.value for view in launch.made())
    returned = {result.view.value for result in program.results}
    lost = (returned & made - made_now) | (returned & written - written_now)
    _refuse_lost(lost, values, "the result contains")


def _given_content(launches: Sequence[Launch]) -> tuple[set[int], set[int]]:
    """What launches make, and what they write without making it and before it is read."""
    made = {view.value for launch in launches for view in launch.made()}
    written: set[int] = set()
    read_before: set[int] = set()
    for launch in launches:
        written.update(launch.writes)
        read_before |= {*launch.reads} - written
    return made, written - made - read_before


def _refuse_lost(lost: set[int], values: Sequence[Value], who: str) -> None:
    named = [
        index for index in sorted(lost) if values[index].role in (Role.ACTIVATION, Role.OUTPUT)
    ]
    if named:
        raise ProgramError(
            f"{who} %{named[0]} ({values[named[0]].name}), which no earlier launch writes"
        )


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclasses.dataclass(frozen=True, slots=True)
class _Moved:
    """Maps everything that names Values to their new positions."""

    positions: Mapping[int, int]

    def value(self, old: Value) -> Value:
        index = self.positions[old.index]
        return old if old.index == index else dataclasses.replace(old, index=index)

    def view(self, old: TensorView) -> TensorView:
        value = self.positions[old.value]
        if value == old.value:
            return old
        # Runs for each argument of each launch; dataclasses.replace would take three times as long.
        return TensorView(
            value,
            old.offset_bytes,
            old.shape,
            old.strides,
            old.dtype,
            old.conjugate,
            old.negative,
            old.requires_grad,
        )

    def argument(self, old: Argument) -> Argument:
        if isinstance(old, TensorView):
            return self.view(old)
        return tuple(self.argument(item) for item in old) if isinstance(old, tuple) else old

    def launch(self, index: int, old: Launch) -> Launch:
        return dataclasses.replace(
            old,
            index=index,
            arguments=tuple(self.argument(item) for item in old.arguments),
            results=tuple(None if item is None else self.view(item) for item in old.results),
            reads=tuple(self.positions[one] for one in old.reads),
            writes=tuple(self.positions[one] for one in old.writes),
        )
