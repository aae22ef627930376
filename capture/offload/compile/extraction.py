"""Extracts launches of a Program as a separate Program."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

from offload.program import (
    Program,
    Result,
    Role,
    TensorView,
    Value,
    is_dense,
    renumbered,
    span_bytes,
)
from offload.program.structure import Structure


@dataclasses.dataclass(frozen=True)
class Extracted:
    """Consecutive launches, extracted from their Program.

    Attributes:
        program: these alone. Its inputs are the Values that they use and do not make, each as a
            whole; its results those that they make and others use.
        inputs: for each of its inputs the view in the original Program.
        made: likewise for each of its results.
    """

    program: Program
    inputs: tuple[TensorView, ...]
    made: tuple[TensorView, ...]

    @functools.cached_property
    def key(self) -> str:
        """The same for launches that do the same, wherever they were recorded; hexadecimal."""
        return program_key(self.program)


def program_key(program: Program) -> str:
    """A digest, equal for Programs that do the same to tensors of the same layout; hexadecimal."""
    content = (
        program.device,
        [(one.role, one.shape, one.strides, one.dtype, one.size_bytes) for one in program.values],
        [(one.name, one.arguments, one.results) for one in program.launches],
        program.inputs,
        program.results,
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()


def is_plain(value: Value) -> bool:
    """Whether a Value is a tensor that fills its memory, without aliasing elements."""
    return (
        value.size_bytes == span_bytes(value.shape, value.strides, value.dtype) > 0
        and is_dense(value.shape, value.strides)
        and not value.on_host
        and not value.device_format
    )


def whole_view(value: Value) -> TensorView:
    """The view of a whole plain Value."""
    return TensorView(value.index, 0, value.shape, value.strides, value.dtype)


def last_uses(program: Program) -> list[int]:
    """For each Value its last launch; beyond all launches if it is visible to the caller."""
    last = [-1] * len(program.values)
    for launch in program.launches:
        for index in (*launch.reads, *launch.writes):
            last[index] = launch.index
    for index in {result.view.value for result in program.results}:
        last[index] = len(program.launches)
    return last


def extract(program: Program, first: int, end: int, used_later: Sequence[int]) -> Extracted:
    """Extract the launches from `first` up to, and excluding, `end`.

    Args:
        program: of the launches. They write only what they make, as a whole, and all Values that
            they use are plain.
        first: the first launch.
        end: behind the last launch.
        used_later: `last_uses` of the program.
    """
    launches = program.launches[first:end]
    made = {view.value: view for launch in launches for view in launch.made()}
    outside = dict.fromkeys(
        index for launch in launches for index in launch.reads if index not in made
    )
    visible = [index for index in made if used_later[index] >= end]
    hidden = [index for index in made if used_later[index] < end]
    roles = (
        [(index, Role.INPUT) for index in outside]
        + [(index, Role.OUTPUT) for index in visible]
        + [(index, Role.ACTIVATION) for index in hidden]
    )
    positions = {index: position for position, (index, _) in enumerate(roles)}
    values = tuple(
        dataclasses.replace(program.values[index], index=positions[index], role=role)
        for index, role in roles
    )
    inside = Program(
        device=program.device,
        values=values,
        launches=tuple(
            renumbered(launch, number, positions) for number, launch in enumerate(launches)
        ),
        inputs=tuple(whole_view(values[positions[index]]) for index in outside),
        results=tuple(
            Result(dataclasses.replace(made[index], value=positions[index])) for index in visible
        ),
        arguments_structure=Structure(
            "tuple", (leaves(len(outside)), Structure("dict", type_name="dict")), type_name="tuple"
        ),
        result_structure=leaves(len(visible)),
    )
    return Extracted(
        inside,
        tuple(whole_view(program.values[index]) for index in outside),
        tuple(made[index] for index in visible),
    )


def leaves(count: int) -> Structure:
    """A tuple of `count` tensors."""
    return Structure(
        "tuple", tuple(Structure("tensor", leaf=leaf) for leaf in range(count)), type_name="tuple"
    )
