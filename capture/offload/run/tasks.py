"""Tasks: executions and Python callables that depend on one another."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any

import torch

from offload.errors import BindingError, DependencyError, ExecutionError, OffloadError
from offload.interpreter.outside_graphs import outside_graphs
from offload.run.deferred import refuse_in_callback, when_ended
from offload.run.ordered_results import check_limit
from offload.run.submitting import (
    After,
    Args,
    Kwargs,
    Submitting,
    tensor_bytes,
    tickets_in,
    with_results,
)
from offload.run.task_threads import TaskThreads, call, in_callable
from offload.run.ticket import Ticket


@outside_graphs
def tasks(
    *,
    max_workers: int | None = None,
    buffersize: int | None = None,
    buffer_bytes: int | None = None,
) -> Tasks:
    """Submit executions and Python callables in a with-block, which ends when all have.

        with offload.tasks() as t:
            a = t.submit(preprocess, x)
            b = t.submit(run, a)
        b.result()

    Args:
        max_workers: how many callables may begin to execute at the same time; by default the
            number of processors that the process may use. One that waits for a ticket does not
            count meanwhile, and goes on afterwards beside as many others.
        buffersize: how many submissions may be in flight; any number if not given.
        buffer_bytes: how many bytes of tensors may be in their arguments, and in the results of
            executions; one submission always may be in flight.

    Raises:
        BindingError: a limit is less than 1.
    """
    return Tasks(max_workers, buffersize, buffer_bytes)


class Tasks:
    """The submissions of a with-block (or an `async with`). Made by `tasks`.

    A ticket among the arguments stands for its result, and is a dependency. A failed submission
    cancels its dependents, which then have a DependencyError, and leaves the others.

    At its end the block waits for all submissions. It raises the error of a submission that failed
    by itself and was not reported by `result`, `wait`, `exception` or `await`; or the
    DependencyError of one whose dependency is not a submission of the block, and likewise was not
    reported. Several errors form an ExceptionGroup. If the block itself raises, submissions that
    have not begun are cancelled, and its exception propagates.

    Owner: the block. Thread: any thread may submit while it lasts.
    """

    def __init__(
        self, max_workers: int | None, buffersize: int | None, buffer_bytes: int | None
    ) -> None:
        """Begin without submissions and threads."""
        for name, limit in (
            ("max_workers", max_workers),
            ("buffersize", buffersize),
            ("buffer_bytes", buffer_bytes),
        ):
            if limit is not None:
                check_limit(name, limit)
        self._max_workers = max_workers or len(os.sched_getaffinity(0))
        self._buffersize, self._buffer_bytes = buffersize, buffer_bytes
        self._pool: TaskThreads | None = None
        self._changed = threading.Condition()  # guards what follows; never held while waiting
        self._in_flight: deque[tuple[Ticket, int, tuple[Ticket, ...]]] = deque()
        self._block = object()  # not this object, which would form a cycle with its tickets
        self._flying_bytes = 0
        self._n_entering = 0  # submissions that have room and no ticket yet
        self._failed: list[tuple[Ticket, tuple[Ticket, ...]]] = []
        self._ended = False

    @outside_graphs
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Ticket:
        """Submit an executable's execution, or a call of a function on a pool's thread.

        Waits while the limits are reached; not in a callable, which other submissions may wait for.
        A callable runs under the grad mode of this call.

        Raises:
            BindingError: the function is a coroutine function, or not callable; or an argument of
                an execution does not fit.
            ExecutionError: the block has ended, or the executable is closed.
        """
        return self._submitted((function, *args), kwargs, ())

    def after(self, *tickets: Ticket) -> After:
        """Return submissions that depend on these tickets without taking their results.

        Raises:
            BindingError: an argument is not a ticket.
        """
        return After(self._submitted, tickets)

    @outside_graphs
    def _submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        function, args = args[0], args[1:]
        self._check_open()
        size_bytes = self._bytes_of(function, args, kwargs)
        with self._room(size_bytes):
            if isinstance(function, Submitting):
                ticket = function._submitted(args, kwargs, after)
            else:
                ticket = self._called(_checked(function), args, kwargs, after)
            given = (*tickets_in(args, kwargs), *after)
            outside = tuple(one for one in given if one._block is not self._block)
            ticket._block = self._block
            self._in_flight.append((ticket, size_bytes, outside))
        return ticket

    def _check_open(self) -> None:
        if self._ended:
            raise ExecutionError("tasks: the block has ended, and accepts no more submissions")

    def _bytes_of(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> int:
        if self._buffer_bytes is None:
            return 0
        if isinstance(function, Submitting):
            return function._bytes_of(args, kwargs)
        return tensor_bytes(args) + tensor_bytes(kwargs)

    @contextlib.contextmanager
    def _room(self, size_bytes: int) -> Iterator[None]:
        """Wait for room, and hold it for the submission that the with-block adds."""
        self._drop_ended()
        while not self._takes_room(size_bytes):
            self._wait_for_room()
        n_bytes = size_bytes
        try:
            yield
            n_bytes = 0  # it is in flight
        finally:
            with self._changed:
                self._n_entering -= 1
                self._flying_bytes -= n_bytes
                self._changed.notify_all()

    def _takes_room(self, size_bytes: int) -> bool:
        """Take the room for a submission, unless a limit is reached."""
        with self._changed:
            self._check_open()
            n_present = len(self._in_flight) + self._n_entering
            is_full = self._buffersize is not None and n_present >= self._buffersize
            is_full |= (
                self._buffer_bytes is not None
                and n_present > 0
                and self._flying_bytes + size_bytes > self._buffer_bytes
            )
            if is_full and not in_callable():
                return False
            self._n_entering += 1
            self._flying_bytes += size_bytes
            return True

    def _wait_for_room(self) -> None:
        """Wait for the oldest submission, or for another thread's to become one."""
        with self._changed:
            if not self._in_flight and self._n_entering:
                refuse_in_callback()
                self._changed.wait()
                return
        self._wait_for_oldest()

    def _drop_ended(self) -> None:
        while self._in_flight and self._in_flight[0][0].done():
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        try:
            ticket, size_bytes, outside = self._in_flight[0]
        except IndexError:  # another thread removed it
            return
        error = ticket._outcome()
        with self._changed:
            try:
                self._in_flight.remove((ticket, size_bytes, outside))
            except ValueError:  # another thread removed it
                return
            self._flying_bytes -= size_bytes
            if error is not None and _is_origin(ticket, error, outside):
                self._failed.append((ticket, outside))
            self._changed.notify_all()

    def _called(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, after: Sequence[Ticket]
    ) -> Ticket:
        """Queue a call on a thread of the pool, once its dependencies have ended."""
        ticket, pool = Ticket(), self._workers()
        tickets = [*tickets_in(args, kwargs), *after]
        in_grad_mode = torch.is_grad_enabled()
        ticket._waits_for = tickets

        def begin() -> None:
            ticket._waits_for = ()
            if any(ticket._fail_as(one) for one in tickets) or ticket.done():
                return
            ready = with_results(args, kwargs, Ticket.result)
            execute = functools.partial(_execute, ticket, function, *ready, in_grad_mode)
            pool.submit(execute, ticket._set_error)

        when_ended(tickets, begin)
        return ticket

    def _workers(self) -> TaskThreads:
        with self._changed:
            if self._pool is None:
                self._pool = TaskThreads(self._max_workers)
            return self._pool

    def _cancel(self) -> None:
        for ticket, _, _ in reversed(self._in_flight):  # dependents before their dependencies
            ticket.cancel()

    def _is_idle(self) -> bool:
        """Whether nothing is in flight; submissions are refused from then on."""
        with self._changed:
            self._ended = self._ended or not (self._in_flight or self._n_entering)
            return self._ended

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._pool is not None:
            self._pool.shut_down()

    def _raise_untold(self) -> None:
        outcomes = [
            error
            for one, outside in self._failed
            if (error := one._outcome()) is not None
            and not one._is_told
            and _is_origin(one, error, outside)
        ]
        # Dependents of a task that raised an exit or an interrupt have the same exception.
        errors = _without_consequences(list({id(error): error for error in outcomes}.values()))
        self._failed.clear()
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup("several tasks failed", errors)

    @outside_graphs
    def __enter__(self) -> Tasks:
        return self

    @outside_graphs
    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if raised is not None:
            self._cancel()
        try:
            while not self._is_idle():
                self._wait_for_room()
        except BaseException:  # an interrupt of the wait
            self._cancel()
            raise
        finally:
            self._end()
        if raised is None:
            self._raise_untold()

    async def __aenter__(self) -> Tasks:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        """End as a with-block does, without blocking the event loop."""
        if raised is not None:
            self._cancel()
        try:
            while not self._is_idle():
                await asyncio.to_thread(self._wait_for_room)
        except BaseException:
            self._cancel()
            raise
        finally:
            await asyncio.to_thread(self._end)
        if raised is None:
            self._raise_untold()


def _checked(function: object) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):
        raise BindingError(
            "tasks: expected an executable or a function, got a coroutine function: call that in "
            "the event loop, and await the tickets there"
        )
    if not callable(function):
        raise BindingError(
            f"tasks: expected an executable or a function, got a {type(function).__qualname__}"
        )
    return function


def _execute(
    ticket: Ticket,
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    in_grad_mode: bool,
) -> None:
    if not ticket._begin():
        return  # it was cancelled
    try:
        with torch.set_grad_enabled(in_grad_mode):
            result = call(ticket, function, args, kwargs)
    except BaseException as error:
        ticket._raised_itself = True
        ticket._set_error(error)
    else:
        ticket._set_result(result)


def _is_origin(ticket: Ticket, error: BaseException, outside: Sequence[Ticket]) -> bool:
    """Whether an error is to be reported by the block, as none of its other submissions is.

    Args:
        ticket: of a submission that has ended.
        error: its error.
        outside: its dependencies that are not submissions of the block.
    """
    if isinstance(error, CancelledError):
        return False
    if not isinstance(error, DependencyError) or ticket._raised_itself:
        return True
    failed = [one for one in outside if one.done() and not one.cancelled() and one._outcome()]
    return any(not one._is_told for one in failed)


def _without_consequences(errors: Sequence[BaseException]) -> list[BaseException]:
    """Leave out DependencyErrors that callables passed on, where their cause is there."""
    return [
        one
        for one in errors
        if not isinstance(one, DependencyError)
        or not any(_is_same(one.__cause__, other) for other in errors)
    ]


def _is_same(one: BaseException | None, other: BaseException) -> bool:
    """Whether both are one error: those of executions are created for each request."""
    if one is other:
        return True
    return isinstance(one, OffloadError) and type(one) is type(other) and str(one) == str(other)
