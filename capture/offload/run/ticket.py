"""Tickets: promises of results."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

import torch

from offload.errors import BackendUnavailable, CopyError
from offload.native import _native
from offload.run.task_threads import in_callable, waiting


class Ticket(_native.Ticket):
    """A submitted execution or task. Dropping it does not stop the work.

    It has the methods of `concurrent.futures.Future` (`done`, `running`, `cancelled` and `cancel`
    are native), and is awaited like an asyncio future. As an argument of a
    submission it stands for its result, and is a dependency. If it fails, the submission does not
    begin and has a DependencyError, whose cause is the first error; if it is cancelled, so is the
    submission.

    Owner: its holder. Thread: any.
    """

    _block: object = None  # of tasks, whose submission it is
    _raised_itself = False  # the callable of a task raised its error
    _waits_for: Sequence[Ticket] = ()  # before it is queued, or while its callable waits

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "a ticket belongs to an execution of this process, and cannot be copied or pickled: "
            "take its result()"
        )

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended; raise its error.

        Raises:
            TimeoutError: that takes longer; the timeout is in seconds.
            CancelledError: it was cancelled; the type is that of `concurrent.futures`.
            ExecutionError: the device failed; this thread has the work to do; or the ticket waits
                for the task whose callable this is.
            Exception: of the callable of a task.
        """
        if self.done() or not in_callable():
            return super().wait(timeout)
        with waiting(self if timeout is None else None):
            return super().wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return its result, the same object each time.

        Raises:
            TimeoutError, CancelledError, ExecutionError, Exception: as `wait`.
        """
        if self.done() or not in_callable():
            return super().result(timeout)
        with waiting(self if timeout is None else None):
            return super().result(timeout)

    def _outcome(self, timeout: float | None = None) -> Exception | None:
        if self.done() or not in_callable():
            return super()._outcome(timeout)
        with waiting(self if timeout is None else None):
            return super()._outcome(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, and return its error; None if it succeeded.

        Raises:
            TimeoutError, CancelledError: as `wait`.
        """
        error = self._outcome(timeout)
        self._tell()
        if error is not None and self.cancelled():
            raise error
        return error

    def add_done_callback(self, function: Callable[[Ticket], object]) -> None:
        """Call `function` with this ticket when it has ended, or at once if it has.

        Callbacks run in order on the thread that ends the ticket. There a wait for a ticket raises
        an ExecutionError, as that thread may have the work to do; submissions are safe. Exceptions
        of the function go to `sys.unraisablehook`.
        """
        self._call_when_done(functools.partial(function, self))

    def future(self) -> concurrent.futures.Future[Any]:
        """Return a Future with its outcome, for `concurrent.futures.wait` and `as_completed`.

        Cancelling the Future does not cancel the ticket.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self.add_done_callback(functools.partial(_hand_over, future))
        return future

    def event(self) -> torch.Event:
        """Return a torch.Event behind the execution, for `stream.wait_event`.

        Waits until the execution was enqueued on the device, not until it has ended. The event is
        recorded by this call, so it also covers work enqueued on the stream since.

        Raises:
            BackendUnavailable: torch knows no streams of the device.
            ExecutionError, CancelledError, BindingError, CaptureError: as `wait`.
        """
        with contextlib.nullcontext() if self.done() else waiting(self):
            found = self._issued_to()
        if found is None:
            raise BackendUnavailable(
                "event: expected an execution on a device whose streams torch knows, got one on a "
                "device without such streams, or a task: wait() for it"
            )
        stream = torch.Stream(stream_id=found[0], device_index=found[1], device_type=found[2])
        event = torch.Event(stream.device)
        event.record(stream)
        return event

    def __await__(self) -> Generator[Any, None, Any]:
        """Return its result. Cancelling the awaiting task cancels the ticket, as `cancel` does.

        Raises:
            asyncio.CancelledError: it or the awaiting task was cancelled.
            Exception: as `result`, except a timeout.
        """
        try:
            yield  # to the loop's other work; a short execution proceeds meanwhile
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
    with contextlib.suppress(RuntimeError):  # the loop is closed, and no task awaits
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
