"""Loads in the way that a backend prefers, with a fallback where its proof fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from offload.backends import Backend, Unproved

T = TypeVar("T")


def load_proved(backend: Backend, load: Callable[[Backend], T]) -> T:
    """Return the result of `load` with a backend, or with the fallback that an Unproved names.

    Fallbacks may be repeated; each earlier load has been released. Notes of a fallback say why it
    was taken; no backend names a backend that was tried.

    Raises:
        OffloadError: as `load`.
    """
    while True:
        try:
            return load(backend)
        except Unproved as unproved:
            instead = unproved.instead
        backend = instead
