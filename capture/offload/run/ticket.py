"""Tickets: the promise of a result that is under way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import torch

from offload.errors import BackendUnavailable, CopyError
from offload.native import _native


class Ticket(_native.Ticket):
    """An execution, or a task, that was submitted. Dropping it does not stop the work.

    It has the methods of `concurrent.futures.Future` (`done`, `running`, `cancelled`, `cancel` and
    `result`, and `wait`, are native), and is awaited as an asyncio future is. Given
    as an argument of a submission it is its result, and what the submission depends on. If that
    fails, the submission is not begun and has a DependencyError, whose cause is the first error;
    if it is cancelled, so is the submission.

    Owner: whoever holds it. Thread: any.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "a ticket belongs to an execution of this process, and cannot be copied or pickled: "
            "take its result()"
        )

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, and return the error that it ended with; None if it ended well.

        Raises:
            TimeoutError, CancelledError: as `wait`.
        """
        error = self._outcome(timeout)
        self._tell()
        if error is not None and self.cancelled():
            raise error
        return error

    def add_done_callback(self, function: Callable[[Ticket], object]) -> None:
        """Have `function` called with this ticket when it has ended, or at once if it has.

        The thread that ends it calls, in the order of these calls. There tickets are not waited for
        (an ExecutionError), as that thread may have the work to do; to submit is safe. What the
        function raises goes to `sys.unraisablehook`.
        """
        self._call_when_done(functools.partial(function, self))

    def future(self) -> concurrent.futures.Future[Any]:
        """A Future with this ticket's outcome, for `concurrent.futures.wait` and `as_completed`.

        To cancel it cancels nothing.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self.add_done_callback(functools.partial(_hand_over, future))
        return future

    def event(self) -> torch.Event:
        """An event of torch's behind the execution, for streams to wait for: `stream.wait_event`.

        It waits until the device has been given the execution, and not until that has ended.
        Recorded when it is asked for, it also covers what was enqueued on the stream since.

        Raises:
            BackendUnavailable: the device has no streams that torch knows.
            ExecutionError, CancelledError, BindingError, CaptureError: as `wait`.
        """
        found = self._issued_to()
        if found is None:
            raise BackendUnavailable(
                "event: expected an execution on a device whose streams torch knows, got one on a "
                "device without, or a task: wait() for it"
            )
        stream = torch.Stream(stream_id=found[0], device_index=found[1], device_type=found[2])
        event = torch.Event(stream.device)
        event.record(stream)
        return event

    def __await__(self) -> Generator[Any, None, Any]:
        """Its result. Cancelling what awaits it cancels it, as `cancel` does.

        Raises:
            asyncio.CancelledError: it was cancelled, or what awaits it is.
            Exception: as `result`, but for a timeout.
        """
        try:
            yield  # to what else the loop has to do; an execution that is short goes on meanwhile
            if not self._wait_soon():
                loop = asyncio.get_running_loop()
                ended = loop.create_future()
                self._call_when_done(functools.partial(_wake, loop, ended))
                yield from ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError("the ticket was cancelled")
        return self.result()


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody awaits
        loop.call_soon_threadsafe(_end, ended)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _hand_over(future: concurrent.futures.Future[Any], ticket: Ticket) -> None:
    error = ticket._outcome()
    if error is None:
        future.set_result(ticket.result())
    else:
        future.set_exception(error)
