"""Whether a generator was set between two states, or drawn from, by this thread or others."""

from __future__ import annotations

import itertools
import struct

import torch

from offload.record.used_generators import is_set


def test_a_generator_on_the_cpu_that_went_back_was_set():
    generator = torch.Generator().manual_seed(3)
    states = [generator.get_state()]
    for count in (1, 5, 600, 100, 624, 10_000, 1_000_000, 1):
        torch.rand(count, generator=generator)
        states.append(generator.get_state())
    for (first, before), (second, now) in itertools.product(enumerate(states), repeat=2):
        assert is_set(before, now) == (second < first), (first, second)


def test_a_normal_number_that_is_kept_for_later_is_a_draw():
    """torch draws two normal numbers at once, and keeps the second in the state."""
    generator = torch.Generator().manual_seed(3)
    states = [generator.get_state()]
    for _ in range(3):
        torch.randn(1, generator=generator, dtype=torch.float64)
        states.append(generator.get_state())
    assert not any(is_set(*pair) for pair in itertools.pairwise(states))


def test_another_seed_was_set():
    first, second = (torch.Generator().manual_seed(seed) for seed in (3, 4))
    assert is_set(first.get_state(), second.get_state())


def test_philox_states_are_told_by_seed_and_offset():
    def state(seed: int, offset: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack("<2q", seed, offset)), dtype=torch.uint8)

    assert not is_set(state(3, 4), state(3, 4))
    assert not is_set(state(3, 4), state(3, 4_000_000_000))
    assert is_set(state(3, 8), state(3, 4))
    assert is_set(state(3, 4), state(5, 4))
