"""Copies between memories that wait or fail."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

from offload.run import transfers


@contextlib.contextmanager
def before_copies(act: Callable[[transfers.Piece], object]) -> Iterator[None]:
    """In this block, call `act` with each piece before it is copied, on the thread of its link.

    What it raises, the copy raises.
    """
    copy = transfers._copy

    def acting(piece: transfers.Piece) -> None:
        act(piece)
        copy(piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "_copy", acting)
        yield


def fail_nth(nth: int) -> Callable[[transfers.Piece], None]:
    """For `before_copies`: refuse the nth copy, from 1."""
    calls = itertools.count(1)

    def fail(_: transfers.Piece) -> None:
        if next(calls) == nth:
            raise RuntimeError("the link is down")

    return fail


def weights_fail(piece: transfers.Piece) -> None:
    """For `before_copies`: refuse the pieces of an 8 by 8 weight."""
    if piece.size_bytes == 256:
        raise RuntimeError("the link is down")
