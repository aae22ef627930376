"""Hand-made programs of launches that each make one Value, and a machine to plan them for."""

from __future__ import annotations

import dataclasses

from offload.plan.topology import CostTable, Machine
from offload.program import Launch, Operator, Program, Result, Role, TensorView, Value
from offload.program.structure import Structure

MACHINE = Machine("test", "test", 0, 64, CostTable())


def view(value: int, n: int = 16) -> TensorView:
    return TensorView(value, 0, (n,), (1,), "float32")


def value(index: int, role: Role, n: int = 16) -> Value:
    return Value(index, role, (n,), (1,), "float32", 4 * n, f"v{index}")


def launch(index: int, reads: list[int], makes: int, **changes: object) -> Launch:
    made = Launch(
        index=index,
        callee=Operator("aten::relu"),
        arguments=tuple(view(one) for one in reads),
        results=(view(makes),),
        reads=tuple(reads),
        writes=(makes,),
        random=False,
        guard=None,
        guards_shape=False,
        source="test.py:1",
    )
    return dataclasses.replace(made, **changes)


def added(line: int = 1, index: int = 0) -> Launch:
    """A launch of aten::add.Tensor at this line of model.py."""
    callee = Operator("aten::add.Tensor")
    return launch(index, [0], 1, callee=callee, source=f"model.py:{line}")


def program(roles: list[Role], launches: list[Launch], returned: int) -> Program:
    values = tuple(value(index, role) for index, role in enumerate(roles))
    inputs = tuple(view(one.index) for one in values if one.role is Role.INPUT)
    return Program(
        device="cpu",
        values=values,
        launches=tuple(launches),
        inputs=inputs,
        results=(Result(view(returned)),),
        weight_views={one.index: (view(one.index),) for one in values if one.role is Role.WEIGHT},
        arguments_structure=Structure(
            "tuple",
            (
                Structure(
                    "tuple", tuple(Structure("tensor", leaf=one) for one in range(len(inputs)))
                ),
                Structure("dict"),
            ),
        ),
        result_structure=Structure("tensor", leaf=0),
    )


ACT, IN, OUT, WEIGHT = Role.ACTIVATION, Role.INPUT, Role.OUTPUT, Role.WEIGHT
