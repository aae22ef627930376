"""Tickets that tests fulfil, and functions that leave results."""

from __future__ import annotations

from offload import Ticket


def promise() -> Ticket:
    """A ticket that the test ends."""
    return Ticket()
