"""Removes launches whose results nobody sees."""

from __future__ import annotations

import dataclasses
from typing import Any

from offload.program import Launch, Program, Result, Role, TensorView, Value


def remove_dead_launches(program: Program) -> Program:
    """Drop launches that no result and no input or weight depends on, and Values left unused.

    Kept in any case: random launches (without them the generator would be elsewhere), guards,
    launches that write nothing at all (they are there for their check), and operators that are
    not torch's own (what else they do is unknown). Inputs and host constants stay even if nothing
    uses them: what was computed from host constants at capture holds only while they are the same.
    """
    needed = {result.view.value for result in program.results}
    needed |= {v.index for v in program.values if v.role in (Role.INPUT, Role.WEIGHT)}
    alive: list[Launch] = []
    for launch in reversed(program.launches):
        if _has_effect(launch) or needed.intersection(launch.writes):
            needed.update(launch.reads)
            needed.update(launch.writes)
            alive.append(launch)
    return _renumbered(program, alive[::-1])


def _has_effect(launch: Launch) -> bool:
    return (
        launch.random
        or launch.guard is not None
        or launch.guards_shape
        or not launch.writes
        or not launch.operator.startswith("aten::")
    )


def _renumbered(program: Program, launches: list[Launch]) -> Program:
    """The program with these launches and only the Values that they or the caller use."""
    used = {view.value for view in program.inputs}
    used |= {result.view.value for result in program.results}
    for launch in launches:
        used.update(launch.reads, launch.writes)
    used |= {one.index for one in program.of_role(Role.WEIGHT) if one.on_host}
    kept = [value for value in program.values if value.index in used]
    new = {value.index: position for position, value in enumerate(kept)}
    in_order = all(launch.index == position for position, launch in enumerate(launches))
    if in_order and len(launches) == len(program.launches) and len(kept) == len(program.values):
        return program

    def view(old: TensorView) -> TensorView:
        return _view_of(new[old.value], old)

    def argument(old: Any) -> Any:
        if isinstance(old, TensorView):
            return view(old)
        return tuple(argument(item) for item in old) if isinstance(old, tuple) else old

    def launched(position: int, old: Launch) -> Launch:
        return dataclasses.replace(
            old,
            index=position,
            arguments=tuple(argument(item) for item in old.arguments),
            results=tuple(None if item is None else view(item) for item in old.results),
            reads=tuple(new[index] for index in old.reads),
            writes=tuple(new[index] for index in old.writes),
        )

    return dataclasses.replace(
        program,
        values=tuple(_moved(value, new[value.index]) for value in kept),
        launches=tuple(launched(position, old) for position, old in enumerate(launches)),
        inputs=tuple(view(old) for old in program.inputs),
        results=tuple(Result(view(old.view), old.input_leaf) for old in program.results),
        weights={new[index]: held for index, held in program.weights.items() if index in new},
        stored={new[index]: held for index, held in program.stored.items() if index in new},
        weight_views={
            new[index]: tuple(view(old) for old in views)
            for index, views in program.weight_views.items()
            if index in new
        },
    )


def _view_of(value: int, old: TensorView) -> TensorView:
    if value == old.value:
        return old
    # A view for each argument of each launch: dataclasses.replace would take three times as long.
    return TensorView(
        value, old.offset_bytes, old.shape, old.strides, old.dtype, old.conjugate, old.negative
    )


def _moved(value: Value, index: int) -> Value:
    return value if value.index == index else dataclasses.replace(value, index=index)
