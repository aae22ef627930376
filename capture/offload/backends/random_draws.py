"""Random numbers of captured models: the generators that an execution draws from, and moves on."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload.program import Program

_draws = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class RandomState:
    """What a captured model with random kernels draws from.

    Attributes:
        generator: whose seed and Philox offset the kernels use.
        increment: by how much one execution moves the offset.
    """

    generator: torch.Generator
    increment: int

    def numbers(self, n_executions: int = 0) -> list[int]:
        """Seed and offset for an execution after so many others; moves nothing."""
        offset = self.generator.get_offset() + n_executions * self.increment
        return [self.generator.initial_seed() % 2**64, offset % 2**64]


def drawing(*states: RandomState) -> Callable[[], list[int]]:
    """What gives each execution the generators' seeds and offsets, and moves them on as eager does.

    Thread: any; executions on several threads draw one after the other.
    """

    def draw() -> list[int]:
        drawn = []
        with _draws:
            for state in states:
                numbers = state.numbers()
                state.generator.set_offset(numbers[1] + state.increment)
                drawn += numbers
        return drawn

    return draw


def generators_of(program: Program, device: torch.device) -> list[torch.Generator]:
    """The device's default generator, and those there that the Program names, each once."""
    module: Any = torch.get_device_module(device)
    default: torch.Generator = module.default_generators[device.index]
    named = [one for one in program.generators if one.device.type == device.type]
    return [default, *(one for one in named if _identity(one) != _identity(default))]


@contextlib.contextmanager
def own_random_states(
    generators: Sequence[torch.Generator], device: torch.device
) -> Iterator[None]:
    """Let captures draw from states that nobody else has, and give generators theirs back.

    A capture registers its graph with a generator's state, which then holds the cells that its
    random kernels read: of a state of its own nobody else's graphs and draws are disturbed.
    """
    saved = [one.graphsafe_get_state() for one in generators]
    try:
        for generator in generators:
            own = torch.Generator(device=device)
            own.set_state(generator.get_state())
            generator.graphsafe_set_state(own)
            del own  # from here on only the generator has the state, and whoever captures it
        yield
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.graphsafe_set_state(state)


def _identity(generator: torch.Generator) -> int:
    """What tells generators apart whose Python objects differ."""
    identity: int = generator._cdata  # type: ignore[attr-defined]
    return identity
