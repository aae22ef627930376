"""Random numbers of a training step whose stages run on several ranks.

Each rank executes all launches that draw, in recorded order, so that its generator stands at each
of them where the generator of one process would. Results that a rank does not use are discarded.
The numbers of one process follow from the state of its generator before the step, so the first rank
sends that state to the others, which set it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from offload.errors import ProgramError
from offload.program.launch import EffectKind, Launch, Operator
from offload.program.program import Program
from offload.program.values import (
    Role,
    Symbol,
    TensorView,
    Value,
    contiguous_strides,
    same_strides,
)

GENERATOR_STATE_BYTES = 5056
"""The bytes of the state of a generator on the CPU.

These are `sizeof(CPUGeneratorImplState)` (aten/src/ATen/CPUGeneratorImpl.cpp); another size is an
error of the launches that take it.
"""

GET_STATE = "offload::get_generator_state"
SET_STATE = "offload::set_generator_state"
"""Operators on the CPU, registered by `native/cpu/generator_states.cpp`."""

# These take a tensor and read only its shape. They draw as the operators that take a shape, by the
# same operator in place (`rand_like`, `randn_like` and `randint_like` in
# aten/src/ATen/native/TensorFactories.cpp).
_OF_SHAPES = {
    "aten::rand_like": "aten::rand",
    "aten::rand_like.generator": "aten::rand.generator",
    "aten::randn_like": "aten::randn",
    "aten::randn_like.generator": "aten::randn.generator",
    "aten::randint_like": "aten::randint",
    "aten::randint_like.generator": "aten::randint.generator",
    "aten::randint_like.low_dtype": "aten::randint.low",
    "aten::randint_like.low_generator_dtype": "aten::randint.low_generator",
}

_N_OPTIONS = 5  # dtype, layout, device, pin_memory, memory_format


def draws(launch: Launch) -> bool:
    """Whether a launch moves a generator."""
    return any(one.kind is EffectKind.GENERATOR for one in launch.effects)


def drawn_by_shape(launch: Launch) -> Launch:
    """A launch that draws numbers like a tensor, by the shape instead; others unchanged.

    Otherwise it would depend on the rank that has the tensor. Results that are not contiguous stay
    as they are, since their numbers lie in another order.
    """
    name = _OF_SHAPES.get(launch.name)
    result = launch.results[0] if launch.results else None
    if name is None or result is None:
        return launch
    if not same_strides(result.shape, result.strides, contiguous_strides(result.shape)):
        return launch
    like, *given = launch.arguments[:-_N_OPTIONS]
    assert isinstance(like, TensorView)
    numbers = [one for one in given if isinstance(one, int)]
    generator = given[len(numbers) :]
    options = (
        Symbol("dtype", result.dtype),
        Symbol("layout", "strided"),
        Symbol("device", "cpu"),
        False,
    )
    return dataclasses.replace(
        launch,
        callee=Operator(name),
        arguments=(*numbers, result.shape, *generator, *options),
        reads=tuple(one for one in launch.reads if one != like.value),
    )


def with_generator_states(program: Program) -> Program:
    """The step behind launches that give all ranks the first rank's generators.

    For each generator the first rank writes its state into a Value, and each rank sets its own to
    it. A step that draws nothing is returned unchanged.
    """
    names = sorted(
        {
            effect.name
            for launch in program.launches
            for effect in launch.effects
            if effect.kind is EffectKind.GENERATOR
        }
    )
    values, launches = list(program.values), list[Launch]()
    for name in names:
        shape = (GENERATOR_STATE_BYTES,)
        state = TensorView(len(values), 0, shape, (1,), "uint8")
        values.append(
            Value(
                state.value,
                Role.ACTIVATION,
                shape,
                (1,),
                "uint8",
                GENERATOR_STATE_BYTES,
                f"the state of generator {name}",
            )
        )
        launches += [_of_state(GET_STATE, state, name), _of_state(SET_STATE, state, name)]
    launches += program.launches
    return dataclasses.replace(
        program,
        values=tuple(values),
        launches=tuple(
            one if one.index == at else dataclasses.replace(one, index=at)
            for at, one in enumerate(launches)
        ),
    )


def _of_state(operator: str, state: TensorView, generator: str) -> Launch:
    is_set = operator == SET_STATE
    return Launch(
        index=0,
        callee=Operator(operator),
        arguments=(state, Symbol("generator", generator)),
        results=(),
        reads=(state.value,) if is_set else (),
        writes=() if is_set else (state.value,),
        random=is_set,
        guard=None,
        guards_shape=False,
        source="the first rank's generator",
    )


def refuse_draws(launches: Sequence[Launch], shared: Set[int]) -> None:
    """Refuse draws that ranks cannot repeat.

    Args:
        launches: of the step.
        shared: the positions of those that compute from what all ranks have.

    Raises:
        ProgramError: a launch draws, and reads what only some ranks have; or a guard depends on
            random numbers. The message names the launch.
    """
    drawn: set[int] = set()  # Values that depend on random numbers
    for at, launch in enumerate(launches):
        where = f"the training step cannot be executed in stages: {launch.place}: {launch.name}"
        if draws(launch) and at not in shared and launch.name != SET_STATE:
            raise ProgramError(
                f"{where} draws random numbers beside a tensor that only some ranks have, and all "
                "ranks must draw the same numbers: draw into a tensor of its shape instead, as "
                "torch.empty_like(x).bernoulli_(p) and torch.rand_like(x) do for a contiguous x"
            )
        is_drawn = draws(launch) or not drawn.isdisjoint(launch.touched())
        if is_drawn and any(one.kind is EffectKind.GUARD for one in launch.effects):
            raise ProgramError(
                f"{where} may end the execution by a random number, which ranks draw later: keep "
                "the number on the device"
            )
        if is_drawn:
            drawn.update(launch.writes)
