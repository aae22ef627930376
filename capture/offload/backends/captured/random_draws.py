"""Random numbers of captured models: the generators that an execution draws from and advances."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.interpreter.generator_states import aside, draws, holder_of, identity_of
from offload.program import BoundProgram, Launch


@dataclasses.dataclass(frozen=True, slots=True)
class RandomState:
    """The generator state of a captured model with random kernels.

    Attributes:
        generator: whose seed and Philox offset the kernels use.
        increment: the advance of the offset per execution.
    """

    generator: torch.Generator
    increment: int

    def numbers(self, n_executions: int = 0) -> list[int]:
        """Seed and offset for an execution after `n_executions` others; advances nothing."""
        with draws:
            own = holder_of(self.generator)
            offset = own.get_offset() + n_executions * self.increment
            return [own.initial_seed() % 2**64, offset % 2**64]

    def draw(self) -> list[int]:
        """Seed and offset for an execution; advances the offset."""
        with draws:
            numbers = self.numbers()
            holder_of(self.generator).set_offset(numbers[1] + self.increment)
            return numbers


class DrawLog:
    """The launches that draw, and from which generators, determined in the warm-up.

    Owner: one preparation of a Program.

    Attributes:
        generator_of: by launch, the position of its generator.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        """Begin before the first launch of the warm-up."""
        self.generator_of: dict[int, int] = {}
        self._generators = generators
        self._first = self._offsets()
        self._last = self._first

    def note(self, launch: Launch) -> None:
        """Note which generators a launch of the warm-up has advanced.

        A launch that could draw and advanced none draws nothing, as dropout of an empty tensor:
        work that draws on the CPU instead cannot be captured.

        Raises:
            CaptureError: it advanced several generators.
        """
        offsets = self._offsets()
        moved = [
            position
            for position, (one, other) in enumerate(zip(self._last, offsets, strict=True))
            if one != other
        ]
        self._last = offsets
        if len(moved) > 1:
            raise CaptureError(
                f"{launch.source}: {launch.name} draws from {len(moved)} random generators at "
                "once, and which of them its kernels read is not known: draw from one generator"
            )
        if moved:
            self.generator_of[launch.index] = moved[0]

    def states(self) -> dict[int, RandomState]:
        """The generators that were drawn from, by position, with their advance in one warm-up."""
        return {
            position: RandomState(
                self._generators[position], self._last[position] - self._first[position]
            )
            for position in sorted(set(self.generator_of.values()))
        }

    def check_captured(self, launches: Sequence[Launch]) -> None:
        """Check that the capture, which has ended, drew nothing from a generator itself.

        Raises:
            CaptureError: a launch drew during the capture, and its numbers are frozen.
        """
        if self._offsets() != self._last:
            names = sorted({launches[index].name for index in self.generator_of})
            raise CaptureError(
                f"{', '.join(names)}: random numbers were drawn during the capture, so each "
                "execution would draw the same numbers"
            )

    def _offsets(self) -> list[int]:
        return [one.get_offset() for one in self._generators]


def drawing(*states: RandomState) -> Callable[[], list[int]]:
    """The function that gives each execution seeds and offsets, and advances them as eager does.

    Thread: any; executions on several threads draw one after another.
    """

    def draw() -> list[int]:
        with draws:
            return [number for state in states for number in state.draw()]

    return draw


def generators_of(bound: BoundProgram, device: torch.device) -> list[torch.Generator]:
    """The device's default generator, and those of the device that the Program names, each once."""
    module: Any = torch.get_device_module(device)
    default: torch.Generator = module.default_generators[device.index]
    named = [one for one in bound.bindings.generators if one.device.type == device.type]
    return [default, *(one for one in named if identity_of(one) != identity_of(default))]


@contextlib.contextmanager
def own_random_states(
    generators: Sequence[torch.Generator], device: torch.device
) -> Iterator[None]:
    """Let captures draw from separate states, and restore the generators' own at the end.

    A capture registers its graph with a generator's state, which then holds the cells that its
    random kernels read; with a separate state other graphs are not affected. Executions on other
    threads draw from the generators' own states meanwhile. torch's own draws on other threads come
    from the captures' states: from other seeds, so that no number is drawn twice.
    """
    with draws:
        saved = [one.graphsafe_get_state() for one in generators]
        outermost = [one for one in generators if identity_of(one) not in aside]
        for generator, state in zip(generators, saved, strict=True):
            aside.setdefault(identity_of(generator), state)
    try:
        for generator in generators:
            own = torch.Generator(device=device)
            own.set_state(generator.get_state())
            offset = own.get_offset()
            own.seed()
            own.set_offset(offset)
            with draws:
                generator.graphsafe_set_state(own)
            del own  # from here only the generator and its captures refer to the state
        yield
    finally:
        with draws:
            for generator, state in zip(generators, saved, strict=True):
                generator.graphsafe_set_state(state)
            for generator in outermost:
                del aside[identity_of(generator)]
