"""Comparison of Programs in everything that can make a difference."""

import dataclasses

from offload.program import Program, TensorView, used_strides


def same(one: Program, other: Program) -> bool:
    """Return whether Programs are equal, except for strides that are never used."""
    return used(one) == used(other)


def used(program: Program) -> Program:
    def view(one):
        if not isinstance(one, TensorView):
            return tuple(map(view, one)) if isinstance(one, tuple) else one
        return dataclasses.replace(one, strides=used_strides(one.shape, one.strides))

    return dataclasses.replace(
        program,
        values=tuple(
            dataclasses.replace(one, strides=used_strides(one.shape, one.strides))
            for one in program.values
        ),
        launches=tuple(
            dataclasses.replace(one, arguments=view(one.arguments), results=view(one.results))
            for one in program.launches
        ),
        inputs=view(program.inputs),
        results=tuple(dataclasses.replace(one, view=view(one.view)) for one in program.results),
    )
