"""Weights on other devices that were written: copied again before executions read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any

from offload.run.deferred import end_of
from offload.run.ticket import Ticket
from offload.run.transfers import Links, Memory
from offload.run.weight_copies import WeightCopies, WeightCopy


class WeightRefresh:
    """Copies written weights to the memories that hold copies of them.

    Owner: a PlacedQueue; callers hold the lock of its executable.
    """

    def __init__(self, copies: WeightCopies | None, links: Links, home: Memory) -> None:
        """Begin without copies under way.

        Args:
            copies: of weights, in other memories; None where no segment reads any.
            links: carry them out.
            home: the caller's memory.
        """
        self._copies, self._links, self._home = copies, links, home
        self._readers: deque[Ticket] = deque()  # executions that read copies of weights
        self._refreshing: dict[Memory, list[Ticket]] = {}

    def tickets(
        self, memories: Set[Memory], ready: Any, number: int
    ) -> Mapping[Memory, Sequence[Ticket]]:
        """Return the tickets that segments wait for, by memory, where weights were written.

        Written weights are copied again once executions that read the copies have ended.

        Args:
            memories: in which segments of the execution may run.
            ready: an event behind the submitting thread's work on the caller's device; or None.
            number: of the execution, for timelines.
        """
        if self._copies is None:
            return {}
        while self._readers and self._readers[0].done():
            self._readers.popleft()
        # First: what has failed by now is stale below, what fails later is waited for.
        left = {
            memory: [one for one in tickets if not one.done()]
            for memory, tickets in self._refreshing.items()
        }
        self._refreshing = {memory: tickets for memory, tickets in left.items() if tickets}
        stale: dict[Memory, list[WeightCopy]] = {}
        for one in self._copies.stale():
            stale.setdefault(one.memory, []).append(one)
        try:
            for memory, copies in stale.items():
                ticket = self._refreshed(self._copies, memory, copies, ready, number)
                self._refreshing.setdefault(memory, []).append(ticket)
        except BaseException:  # an interrupt: they count as copied, and are not
            for copies in stale.values():
                self._copies.copied(copies, is_right=False)
            raise
        return {
            memory: tuple(tickets)
            for memory, tickets in self._refreshing.items()
            if memory in memories
        }

    def _refreshed(
        self,
        copies: WeightCopies,
        memory: Memory,
        stale: Sequence[WeightCopy],
        ready: Any,
        number: int,
    ) -> Ticket:
        """Copy weights again; the ticket ends once `copies` knows whether this succeeded.

        The ticket cannot be cancelled, as several executions may wait for it.
        """
        before = (*end_of(tuple(self._readers)), *end_of(self._refreshing.get(memory, ())))
        pieces = copies.pieces(stale)
        what = f"weights that were written to {memory.device}"
        copied = self._links.copy(
            self._home, memory, pieces, what, number=number, after=before, ready=(ready,)
        )
        ended = Ticket()
        ended._begin()

        def end() -> None:
            error = copied._outcome()
            copies.copied(stale, is_right=error is None)
            if error is None:
                ended._set_result(None)
            else:
                ended._set_error(error)

        copied._call_when_done(end)
        return ended

    def note_reader(self, ticket: Ticket) -> None:
        """Note queued work that reads copies of weights."""
        if self._copies is not None:
            self._readers.append(ticket)
