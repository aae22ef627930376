"""Hand-made parts of Programs, and a Program of all kinds of parts."""

from __future__ import annotations

import dataclasses

from offload.program import (
    Launch,
    Operator,
    Overlap,
    Program,
    Result,
    Role,
    TensorView,
    Value,
)
from offload.program.structure import Structure

N_BYTES = 32


def view(value: int) -> TensorView:
    return TensorView(value, 0, (8,), (1,), "float32")


def value(index: int, role: Role) -> Value:
    return Value(index, role, (8,), (1,), "float32", N_BYTES, f"{role}{index}")


def launch(index: int, reads: tuple[int, ...], makes: int, **changes: object) -> Launch:
    plain = Launch(
        index=index,
        callee=Operator("aten::add.Tensor"),
        arguments=(*(view(one) for one in reads), (view(reads[0]), None), 1),
        results=(view(makes),),
        reads=reads,
        writes=(makes,),
        random=False,
        guard=None,
        guards_shape=False,
        source=f"net.py:{index}",
    )
    return dataclasses.replace(plain, **changes)


def leaves(count: int) -> tuple[Structure, ...]:
    return tuple(Structure("tensor", leaf=leaf) for leaf in range(count))


ROLES = (Role.ACTIVATION, Role.INPUT, Role.INPUT, Role.WEIGHT, Role.ACTIVATION, Role.OUTPUT)


def make(**changes: object) -> Program:
    """Two inputs, a weight, an unused launch and two that make the output."""
    program = Program(
        device="cpu",
        values=tuple(value(index, role) for index, role in enumerate(ROLES)),
        launches=(launch(0, (1,), 0), launch(1, (2, 3), 4), launch(2, (4, 1), 5)),
        inputs=(view(1), view(2)),
        results=(Result(view(5)), Result(view(2), 1)),
        arguments_structure=Structure("tuple", (Structure("tuple", leaves(2)), Structure("dict"))),
        result_structure=Structure("tuple", leaves(2)),
        overlaps=(Overlap(0, 1, 16),),
        weight_views={3: (view(3),)},
    )
    return dataclasses.replace(program, **changes)
