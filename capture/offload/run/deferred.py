"""Submissions that wait until what they depend on has ended, and where none overtakes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from offload.native import _native
from offload.run.ticket import Ticket

_thread = threading.local()


class Deferred:
    """The submissions to one executable whose arguments are not known yet.

    Where executions leave something, none that comes later overtakes them: calls wait until they
    are queued, submissions queue behind them. A callable of a task goes ahead, as one of them may
    wait for it.

    Owner: the executable. Thread: any, under the GIL.

    Attributes:
        keeps_order: whether executions leave something.
    """

    def __init__(self, native: _native.Replay, *, keeps_order: bool) -> None:
        """None yet."""
        self._native, self.keeps_order = native, keeps_order
        self._pending: dict[_native.Ticket, None] = {}

    def __bool__(self) -> bool:
        """Whether a submission that is made here and now must not be queued at once."""
        return bool(self._pending) and self.keeps_order and not in_callable()

    def pending(self) -> list[_native.Ticket]:
        """What ends as each of them is queued, or has failed before."""
        return list(self._pending)

    def add(self) -> _native.Ticket:
        """One more; `end` it when it is queued."""
        placed = _native.Ticket()
        self._pending[placed] = None
        self._tell()
        return placed

    def end(self, placed: _native.Ticket) -> None:
        """One is queued, or has failed."""
        self._pending.pop(placed, None)
        self._tell()
        placed._set_result(None)

    def wait(self) -> None:
        """Wait until those that there are now are queued, but in a callable of a task."""
        if in_callable():
            return
        for one in self.pending():
            one._outcome()
            self._pending.pop(one, None)  # in the child of a fork, where nobody ends it
        self._tell()

    def _tell(self) -> None:
        if self.keeps_order:
            self._native.set_deferred(len(self._pending), self.wait if self._pending else None)


_thread = threading.local()


def in_callable() -> bool:
    """Whether this thread executes the callable of a task."""
    return getattr(_thread, "in_callable", False)


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute the callable of a task."""
    _thread.in_callable = True
    try:
        return function(*args, **kwargs)
    finally:
        _thread.in_callable = False


def when_ended(tickets: Iterable[_native.Ticket], function: Callable[[], None]) -> None:
    """Call a function when all of them have ended, on the thread that ends the last; or now."""
    _Waiting(tickets, function)()


class _Waiting:
    """What is called as each of some tickets ends; no cycle, which would keep what these hold."""

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
        ExecutionError: this is one, where no ticket may be waited for.
    """
    with contextlib.suppress(TimeoutError):
        _native.Ticket()._outcome(0)


def end_of(tickets: Sequence[Ticket]) -> tuple[Ticket, ...]:
    """What ends well when all of them have ended, well or not; nothing where they have."""
    left = [one for one in tickets if not one.done()]
    if not left:
        return ()
    ended = Ticket()
    when_ended(left, lambda: ended._set_result(None))
    return (ended,)


def defer(
    deferred: Deferred,
    submission: _native.Ticket,
    after: Sequence[_native.Ticket],
    place: Callable[[], object],
) -> None:
    """Have a submission queued when tickets have ended, and what it must not overtake is queued.

    Args:
        deferred: of the executable.
        submission: what ends if it cannot be queued: one of the tickets has failed, or `place`
            raised.
        after: the tickets.
        place: queues it.
    """
    placed = deferred.add()
    before = deferred.pending()[:-1] if deferred.keeps_order and not in_callable() else []

    def go_on() -> None:
        try:
            if not any(submission._fail_as(one) for one in after) and not submission.done():
                place()
        except BaseException as error:
            submission._set_error(error)
        finally:
            deferred.end(placed)

    when_ended([*after, *before], go_on)
