"""Callables of tasks: one that raises, one that waits."""

from __future__ import annotations

WAITING_SECONDS = 60


class Refused(Exception):
    """Raised by callables of these tests."""


def refuse(*_: object) -> None:
    raise Refused
