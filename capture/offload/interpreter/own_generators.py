"""Programs that draw from separate generators, for executions that no caller requested.

torch has one default generator for all threads: drawing from it and restoring it afterwards gives
the same numbers twice to threads that draw meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from offload.interpreter.torch_names import find_overload, split_operator
from offload.program import BoundProgram, Launch, Operator, Symbol

_DEFAULT = Symbol("generator", "0")


@dataclasses.dataclass(frozen=True, slots=True)
class DrawingAlone:
    """A Program whose random launches draw from generators that nothing else uses.

    Attributes:
        bound: the same launches at the same positions, with separate generators.
        others: random launches whose operators take no generator: unchanged, they would draw from
            the device's default generator.
    """

    bound: BoundProgram
    others: tuple[Launch, ...]

    @property
    def refusal(self) -> str:
        """Why executing the program would draw from shared generators; empty if it would not."""
        if not self.others:
            return ""
        first = self.others[0]
        return (
            f"{first.source}: {first.name} takes no generator, so it would draw from the device's "
            "generator, which others use"
        )


def drawing_alone(
    bound: BoundProgram, states: Sequence[torch.Tensor] | None = None
) -> DrawingAlone:
    """Give the random launches of a Program separate generators.

    Args:
        bound: its first generator is the default one of its device.
        states: the initial state for each of its generators; None: their present state.
    """
    program, bindings = bound.program, bound.bindings
    if not program.is_random:
        return DrawingAlone(bound, ())
    if states is None:
        states = [one.get_state() for one in bindings.generators]
    own = []
    for one, state in zip(bindings.generators, states, strict=True):
        own.append(torch.Generator(one.device))
        own[-1].set_state(state)
    launches = [_given_generator(launch) for launch in program.launches]
    others = tuple(
        launch
        for launch, given in zip(program.launches, launches, strict=True)
        if launch.random and given is None
    )
    given = tuple(one or launch for launch, one in zip(program.launches, launches, strict=True))
    return DrawingAlone(
        BoundProgram(
            dataclasses.replace(program, launches=given),
            dataclasses.replace(bindings, generators=tuple(own)),
        ),
        others,
    )


def _given_generator(launch: Launch) -> Launch | None:
    """A random launch that names its generator; None for others, and where it cannot."""
    found = _with_generator(launch.name) if launch.random else None
    if found is None:
        return None
    operator, position = found
    arguments = list(launch.arguments)
    if operator != launch.name:
        arguments.insert(position, _DEFAULT)
    elif arguments[position] is None:
        arguments[position] = _DEFAULT
    return dataclasses.replace(launch, callee=Operator(operator), arguments=tuple(arguments))


@functools.cache
def _with_generator(operator: str) -> tuple[str, int] | None:
    """The overload of an operator that takes a generator, often itself, and its position."""
    if not operator.startswith("aten::"):
        return None  # how others use a generator is unknown
    wanted = _signature(find_overload(operator))
    name, _ = split_operator(operator)
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    own_position = _generator_position(wanted)
    if own_position is not None:
        return operator, own_position
    for overload in packet.overloads():
        signature = _signature(getattr(packet, overload))
        position = _generator_position(signature)
        if position is not None and signature[:position] + signature[position + 1 :] == wanted:
            return f"{name}.{overload}", position
    return None


def _signature(overload: Any) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in overload._schema.arguments]


def _generator_position(signature: Sequence[tuple[str, str]]) -> int | None:
    return next((at for at, (_, kind) in enumerate(signature) if "Generator" in kind), None)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on a device draw from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator
