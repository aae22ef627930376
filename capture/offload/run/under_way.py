"""Executions on several devices that are under way: waited for, also when the interpreter exits."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

from offload.errors import ExecutionError
from offload.run.ticket import Ticket


class UnderWay:
    """The executions of one executable that may be under way.

    Executions keep their tickets, which are not kept here: an ended one keeps results.

    Owner: a PlacedQueue. Thread: any; `note` with the executable's lock.
    """

    def __init__(self, owner: object) -> None:
        """Begin without executions; they are waited for at exit even if the owner is dropped."""
        self._owner = weakref.ref(owner)
        self._executions: deque[Sequence[weakref.ref[Ticket]]] = deque()
        for one in list(_every):
            if one._owner() is None and not one.tickets():
                _every.pop(one, None)
        _every[self] = None

    def note(self, tickets: Sequence[Ticket]) -> None:
        """Note the tickets of an execution."""
        while self._executions and all(one.done() for one in _kept(self._executions[0])):
            self._executions.popleft()
        self._executions.append([weakref.ref(one) for one in tickets])

    def tickets(self) -> list[Ticket]:
        """Return the tickets of executions that have not ended."""
        noted = list(self._executions)
        return [one for tickets in noted for one in _kept(tickets) if not one.done()]

    def wait(self) -> None:
        """Wait for executions under way."""
        for one in self.tickets():
            one._outcome()


def _kept(tickets: Sequence[weakref.ref[Ticket]]) -> Iterator[Ticket]:
    return (one for one in (each() for each in tickets) if one is not None)


_every: dict[UnderWay, None] = {}
_exit = {"has_begun": False}


def refuse_at_exit() -> None:
    """Refuse an execution once the interpreter waits for the last ones.

    Raises:
        ExecutionError: it does; a thread that goes on submitting would hold up the exit.
    """
    if _exit["has_begun"]:
        raise ExecutionError(
            "the interpreter is exiting: nothing is executed any more: join threads that execute, "
            "or wait for their tickets, before the program ends"
        )


# Registered after, so called before, the lanes of executables are closed: segments that wait for
# copies or for others are given to lanes when these end.
@atexit.register
def _end_executions() -> None:
    _exit["has_begun"] = True
    for one in list(_every):
        one.wait()
