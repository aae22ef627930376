"""The generators from which launches of a recorded call draw, and whether the call sets them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.interpreter.generator_states import identity_of, own_state

_SEED_BYTES = 8

# Fields in the state of torch's CPU generators, a Mersenne twister (torch's
# CPUGeneratorImplStateLegacy): the seed, how many numbers are left of a block, and the block.
_LEFT = slice(8, 12)
_BLOCK = slice(24, 24 + 624 * 8)
_BLOCK_NUMBERS = 624

# The range of the search: first near by, then 2.5 million numbers, in some 10 ms. Other threads may
# draw more between two launches.
_SEARCHED_BLOCKS = (16, 4096)
_COMPARED = 8


class UsedGenerators:
    """Generators known before the call, in the order in which they were noted.

    Owner: one LaunchRecorder. Other threads may draw from them meanwhile, and load a program, whose
    capture puts their states aside. Iteration yields each with its own state at first use.

    Attributes:
        default_set_elsewhere: another thread has seeded or restored the first generator.
    """

    def __init__(self) -> None:
        self.default_set_elsewhere = False
        self._noted: list[tuple[torch.Generator, torch.Tensor]] = []
        self._last: list[torch.Tensor] = []
        self._visible: list[torch.Tensor] = []  # of a capture while that draws from the generator
        self._forks: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[tuple[torch.Generator, torch.Tensor]]:
        return iter(self._noted)

    def check(self, generator: torch.Generator, name: str) -> None:
        """Refuse a generator that was not known before the call.

        Args:
            generator: the generator that a launch receives.
            name: the launch's operator.

        Raises:
            CaptureError: the call made it, and a replay would continue to draw from it.
        """
        if all(identity_of(known) != identity_of(generator) for known, _ in self._noted):
            raise CaptureError(
                f"{user_location()}: {name} draws from a torch.Generator that the call made, "
                "whose sequence a replay would not restart: pass it as an argument, or let the "
                "model hold it"
            )

    def note(self, generator: torch.Generator) -> int:
        """The position of a generator among those used; its state is kept at first use."""
        for position, (known, _) in enumerate(self._noted):
            if identity_of(known) == identity_of(generator):
                return position
        state = own_state(generator)
        self._noted.append((generator, state))
        self._last.append(state)
        self._visible.append(generator.get_state())
        return len(self._noted) - 1

    def begin(self) -> None:
        """Note the states at the beginning of the call: they may have been set before."""
        self._noted = [(generator, own_state(generator)) for generator, _ in self._noted]
        self._last = [state for _, state in self._noted]
        self._visible = [generator.get_state() for generator, _ in self._noted]

    def set_default(self, state: torch.Tensor) -> None:
        """Begin or end a temporary restoration of the CPU's default generator.

        A checkpoint recomputes from the state that the forward found, then restores the state
        before (torch/utils/checkpoint.py). Without draws this has no effect.
        """
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            generator = torch.default_generator
            self.check_unseeded()
            if self._forks and torch.equal(state, self._forks[-1]):
                self._forks.pop()
            else:
                self._forks.append(generator.get_state())
            generator.set_state(state)
            position = self.note(generator)
            self._last[position] = self._visible[position] = generator.get_state()

    def refuse_forked(self) -> None:
        """Refuse draws, or a call's end, while the default generator is temporarily restored.

        Raises:
            CaptureError: it is.
        """
        if self._forks:
            raise CaptureError(
                f"{user_location()}: the call restores torch's random generator "
                "(torch.set_rng_state, a checkpoint) and draws from it before it puts it back, or "
                "never does: a replay would draw other numbers; take dropout out of what is "
                "checkpointed"
            )

    def check_unseeded(self) -> None:
        """Refuse a call that set the state of a generator since the last launch that drew.

        Draws by other threads meanwhile are allowed.

        Raises:
            CaptureError: a generator was seeded, or restored to an earlier state.
        """
        states = list(zip(self._noted, self._last, strict=True))
        for (generator, _), last in states[self.default_set_elsewhere :]:
            if is_set(last, own_state(generator)):
                raise CaptureError(
                    f"{user_location()}: a random generator was left in a state that no draw "
                    "explains: the call seeds or restores it in Python (torch.manual_seed, "
                    "torch.random.fork_rng, Generator.set_state), which a replay would not do "
                    "again, or another thread does meanwhile; do it before the call, or pass a "
                    "torch.Generator of the call's own"
                )

    def note_drawn(self) -> bool:
        """Note the states after a launch; return whether any has moved since the last launch."""
        before = self._last + self._visible
        self._last = [own_state(generator) for generator, _ in self._noted]
        self._visible = [generator.get_state() for generator, _ in self._noted]
        return not all(map(torch.equal, before, self._last + self._visible))


def is_set(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether a generator was seeded or restored between two states, rather than drawn from.

    A restoration to a state from long before, or with more draws than are searched, counts as
    drawn.

    Args:
        before: the state as `torch.Generator.get_state` gives it, on the CPU or of an accelerator.
        now: a later one of the same generator.
    """
    if torch.equal(before, now):
        return False
    if not torch.equal(before[:_SEED_BYTES], now[:_SEED_BYTES]):
        return True
    if before.numel() < _BLOCK.stop:  # Philox: the seed, and the number of draws
        return _number(now, slice(_SEED_BYTES, 16)) < _number(before, slice(_SEED_BYTES, 16))
    is_same_block = torch.equal(before[_BLOCK], now[_BLOCK])
    if is_same_block:
        return _number(now, _LEFT) > _number(before, _LEFT)
    return not _leads_to(before, now) and _leads_to(now, before)


def _leads_to(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether drawing takes a CPU generator from one state to the block of another."""
    wanted = _after_block(other, _COMPARED)
    for n_blocks in _SEARCHED_BLOCKS:
        numbers = _after_block(state, n_blocks * _BLOCK_NUMBERS)
        begins = numbers.view(n_blocks, _BLOCK_NUMBERS)[:, :_COMPARED]
        if bool((begins == wanted).all(1).any()):
            return True
    return False


def _after_block(state: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers that a CPU generator draws once those of its block are used up."""
    generator = torch.Generator()
    generator.set_state(state)
    n_left = _number(state, _LEFT) - 1
    return torch.empty(n_left + count, dtype=torch.int32).random_(generator=generator)[n_left:]


def _number(state: torch.Tensor, where: slice) -> int:
    return int.from_bytes(bytes(state[where].tolist()), "little")
