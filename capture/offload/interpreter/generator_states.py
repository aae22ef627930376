"""The own states of generators, which are put aside while a capture draws from the generators."""

from __future__ import annotations

import threading

import torch

draws = threading.RLock()
"""Held while states are put aside, restored, read and advanced by offload."""

aside: dict[int, torch.Generator] = {}
"""By identity of a generator that draws for a capture: what holds its own state meanwhile."""


def identity_of(generator: torch.Generator) -> int:
    """Identifies a generator whose Python objects may differ."""
    identity: int = generator._cdata  # type: ignore[attr-defined]
    return identity


def holder_of(generator: torch.Generator) -> torch.Generator:
    """What holds a generator's own state, also while another thread's capture draws from it.

    Thread: any, which holds `draws` until it has used the result.
    """
    return aside.get(identity_of(generator), generator)


def own_state(generator: torch.Generator) -> torch.Tensor:
    """A generator's own state, also while another thread's capture draws from it."""
    with draws:
        return holder_of(generator).get_state()


def set_own_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator's own state, also while another thread's capture draws from it."""
    with draws:
        holder_of(generator).set_state(state)
