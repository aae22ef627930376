"""Loading in the way that a backend prefers, or in another one where the proof of that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from offload.backends import Backend, Unproved

T = TypeVar("T")


def load_proved(backend: Backend, load: Callable[[Backend], T]) -> T:
    """What `load` gives with a backend, or with the one that an Unproved names instead, and so on.

    What was loaded before has been given back by then. Notes of another way say why it was taken;
    no backend names one that was tried.

    Raises:
        OffloadError: as `load`.
    """
    while True:
        try:
            return load(backend)
        except Unproved as unproved:
            instead = unproved.instead
        backend = instead
