"""Inputs and outputs of which a captured program uses copies, as its kernels keep addresses.

A copy in runs before the kernels, from the execution's tensor to memory of the capture; a copy out
runs after them.
"""

from __future__ import annotations

import dataclasses

from offload.program import Program, Role, is_dense


@dataclasses.dataclass(frozen=True, slots=True)
class CopiedValue:
    """An input or output whose tensor has another address in each execution.

    Attributes:
        value: the Value of the Program.
        size_bytes: at least 1.
        copied_in: before the kernels, which read it or write a part of it.
        copied_out: after them, which write it.
    """

    value: int
    size_bytes: int
    copied_in: bool
    copied_out: bool


def copied_value(program: Program, value: int) -> CopiedValue:
    """The copies of an input or output of the Program that holds bytes."""
    is_input = program.values[value].role is Role.INPUT
    return CopiedValue(
        value,
        program.values[value].size_bytes,
        copied_in=is_input,
        copied_out=not is_input or value in program.written_values,
    )


def why_uncopiable(program: Program, value: int) -> str:
    """Why an input or output cannot be copied; empty if it can."""
    name = program.values[value].name
    for overlap in program.overlaps:
        pair = [program.inputs[leaf].value for leaf in (overlap.first, overlap.second)]
        if value in pair:
            first, second = (program.values[index].name for index in pair)
            return (
                f"{first} and {second} share memory, and one of them is written: a captured model "
                "works on copies of inputs, which would not share it; pass a clone() of one"
            )
    is_written = value in program.written_values
    for view in program.inputs:
        if view.value == value and is_written and not is_dense(view.shape, view.strides):
            return (
                f"{name} is written, and has gaps between its elements: a captured model copies "
                "it back as a whole, and would also write the gaps; pass it contiguous"
            )
    return ""
