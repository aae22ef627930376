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

_TURNS = 4
"""So many turns of an event loop look whether a ticket is done before its end wakes the loop.

A turn without anything else to do takes a few microseconds, and to be woken by another thread
tens of them (bench/bench_tasks.py).
"""


class Ticket:
    """An execution, or a task, that was submitted. Dropping it does not stop the work.

    It has the methods of `concurrent.futures.Future`, and is awaited as an asyncio future is. Given
    as an argument of a submission it is its result, and what the submission depends on. If that
    fails, the submission is not begun and has a DependencyError, whose cause is the first error;
    if it is cancelled, so is the submission.

    Owner: whoever holds it. Thread: any.
    """

    def __init__(self, native: _native.Ticket) -> None:
        """Give a native ticket its methods."""
        self._native = native
        self._is_told = False  # whether its error was raised to somebody

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "a ticket belongs to an execution of this process, and cannot be copied or pickled: "
            "take its result()"
        )

    def done(self) -> bool:
        """Whether it has ended, well or not, or was cancelled."""
        return self._native.done()

    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._native.running()

    def cancelled(self) -> bool:
        """Whether it was cancelled, or what it depends on was."""
        return self._native.cancelled()

    def cancel(self) -> bool:
        """Cancel it, if it has not begun: what it depends on goes on. Whether it is cancelled."""
        return self._native.cancel()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has ended, for at most `timeout` seconds.

        Raises:
            TimeoutError: it has not ended by then, and goes on.
            concurrent.futures.CancelledError: it was cancelled.
            DependencyError: what it depends on failed.
            ExecutionError: a launch failed; or a done-callback, or a launch, waits for what its
                own thread has to do.
            CaptureError: an operator laid its result out otherwise than it was recorded.
            BindingError: a guard found another value than the recorded one; or an argument that
                was not known at the submission does not fit.
            Exception: what the callable of a task raised.
        """
        try:
            self._native.wait(timeout)
        except BaseException:
            self._is_told = self._native.done()
            raise

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return what the model or the callable returns; the same objects at each call.

        Raises:
            TimeoutError, CancelledError, DependencyError, ExecutionError, CaptureError,
            BindingError, Exception: as `wait`.
        """
        try:
            return self._native.result(timeout)
        except BaseException:
            self._is_told = self._native.done()
            raise

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, and return the error that it ended with; None if it ended well.

        Raises:
            TimeoutError, CancelledError: as `wait`.
        """
        try:
            self._native.wait(timeout)
        except Exception as error:
            if self._native.cancelled() or not self._native.done():
                raise
            self._is_told = True
            return error
        return None

    def add_done_callback(self, function: Callable[[Ticket], object]) -> None:
        """Have `function` called with this ticket when it has ended, or at once if it has.

        The thread that ends it calls, in the order of these calls. There tickets are not waited for
        (an ExecutionError), as that thread may have the work to do; to submit is safe. What the
        function raises goes to `sys.unraisablehook`.
        """
        self._native.add_done_callback(functools.partial(function, self))

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
        found = self._native.issued_to()
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
        for _ in range(_TURNS):
            if self._native.done():
                break
            yield  # to what else the loop has to do
        else:
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            self._native.add_done_callback(functools.partial(_wake, loop, ended))
            try:
                yield from ended
            except asyncio.CancelledError:
                self._native.cancel()
                raise
        if self._native.cancelled():
            raise asyncio.CancelledError("the ticket was cancelled")
        return self.result()


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody awaits
        loop.call_soon_threadsafe(_end, ended)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _hand_over(future: concurrent.futures.Future[Any], ticket: Ticket) -> None:
    try:
        result = ticket._native.result()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
