"""Submissions that wait for their dependencies, queued in order where order matters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from offload.native import _native
from offload.run.task_threads import in_callable
from offload.run.ticket import Ticket


class Deferred:
    """Submissions to one executable whose arguments are not known yet.

    Where executions leave state, no later execution overtakes these: calls wait until they are
    queued, and submissions queue behind them. A callable of a task goes ahead, as a deferred
    submission may wait for it.

    Owner: the executable. Thread: any, under the GIL.

    Attributes:
        keeps_order: whether executions leave state.
    """

    def __init__(self, native: _native.Replay, *, keeps_order: bool) -> None:
        """Begin without submissions."""
        self._native, self.keeps_order = native, keeps_order
        self._pending: dict[_native.Ticket, None] = {}

    def __bool__(self) -> bool:
        """Whether a submission made now by this thread must not be queued at once."""
        return bool(self._pending) and self.keeps_order and not in_callable()

    def pending(self) -> list[_native.Ticket]:
        """Return tickets that end when a deferred submission is queued, or has failed before."""
        return list(self._pending)

    def add(self) -> _native.Ticket:
        """Add a submission; `end` it when it is queued."""
        placed = _native.Ticket()
        self._pending[placed] = None
        self._tell()
        return placed

    def end(self, placed: _native.Ticket) -> None:
        """Note that a submission is queued, or has failed."""
        self._pending.pop(placed, None)
        self._tell()
        placed._set_result(None)

    def wait(self) -> None:
        """Wait until the present submissions are queued; a no-op in a callable of a task."""
        if in_callable():
            return
        for one in self.pending():
            one._outcome()
            self._pending.pop(one, None)  # in a forked child no thread ends it
        self._tell()

    def _tell(self) -> None:
        if self.keeps_order:
            self._native.set_deferred(len(self._pending), self.wait if self._pending else None)


def when_ended(tickets: Iterable[_native.Ticket], function: Callable[[], None]) -> None:
    """Call a function when all tickets have ended: on the thread that ends the last, or now."""
    _Waiting(tickets, function)()


class _Waiting:
    """A callback on the end of each ticket; no reference cycle, which would keep its operands."""

    def __init__(self, tickets: Iterable[_native.Ticket], function: Callable[[], None]) -> None:
        self._left = [one for one in tickets if not one.done()]
        self._function = function

    def __call__(self) -> None:
        while self._left:
            one = self._left.pop()
            if not one.done():
                one._call_when_done(self)
                return
        self._function()


def refuse_in_callback() -> None:
    """Refuse to wait in a done-callback.

    Raises:
        ExecutionError: this is a done-callback, where no ticket may be waited for.
    """
    with contextlib.suppress(TimeoutError):
        _native.Ticket()._outcome(0)


def end_of(tickets: Sequence[Ticket]) -> tuple[Ticket, ...]:
    """Return a ticket that succeeds once all have ended, well or not; empty if they have."""
    left = [one for one in tickets if not one.done()]
    if not left:
        return ()
    ended = Ticket()
    when_ended(left, lambda: ended._set_result(None))
    return (ended,)


def defer(
    deferred: Deferred,
    submission: Ticket,
    after: Sequence[_native.Ticket],
    place: Callable[[], object],
) -> None:
    """Queue a submission once tickets have ended and those it must not overtake are queued.

    Args:
        deferred: the executable's.
        submission: ends with an error if it cannot be queued: a ticket has failed, or `place`
            raised.
        after: the tickets.
        place: queues the submission.
    """
    placed = deferred.add()
    before = deferred.pending()[:-1] if deferred.keeps_order and not in_callable() else []

    def go_on() -> None:
        submission._waits_for = ()
        try:
            if not any(submission._fail_as(one) for one in after) and not submission.done():
                place()
        except BaseException as error:
            submission._set_error(error)
        finally:
            deferred.end(placed)

    when_ended([*after, *before], go_on)
