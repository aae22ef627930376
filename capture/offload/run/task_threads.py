"""Threads that execute the callables of tasks, and what a wait means there."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from offload.errors import ExecutionError

_UNLIMITED = 1 << 30

# Tickets looked at, at most, before a callable waits: so that long chains stay quick.
_MOST_LOOKED_AT = 1_000

_thread = threading.local()


class TaskThreads:
    """A pool of threads, of which a limited number executes callables at the same time.

    A callable that waits for a ticket does not count meanwhile, as it may wait for one that is
    queued here. Afterwards it goes on at once, beyond the limit if need be.

    Owner: one block of tasks. Thread: any.
    """

    def __init__(self, max_executing: int) -> None:
        """Begin without threads."""
        self._max_executing = max_executing
        self._threads = ThreadPoolExecutor(_UNLIMITED, thread_name_prefix="offload-task")
        self._lock = threading.Lock()  # guards what follows; nothing is called under it
        self._queued: deque[tuple[Callable[[], None], Callable[[BaseException], None]]] = deque()
        self._n_executing = 0

    def submit(self, execute: Callable[[], None], refuse: Callable[[BaseException], None]) -> None:
        """Queue a call of `execute`, which raises nothing.

        Args:
            execute: the work.
            refuse: called instead with an ExecutionError where no thread can be started: the pool
                was shut down, the interpreter is exiting, or the system has no thread left.
        """
        with self._lock:
            self._queued.append((execute, refuse))
        self._begin_queued()

    def shut_down(self) -> None:
        """Wait for what is executing; later submissions are refused."""
        self._threads.shutdown()

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """Do not count the callable of this thread, which waits, inside the with-block."""
        with self._lock:
            self._n_executing -= 1
        self._begin_queued()
        try:
            yield
        finally:
            with self._lock:
                self._n_executing += 1

    def _begin_queued(self) -> None:
        while True:
            with self._lock:
                if not self._queued or self._n_executing >= self._max_executing:
                    return
                execute, refuse = self._queued.popleft()
                self._n_executing += 1
            first = [execute]
            try:
                self._threads.submit(self._work, first)
            except RuntimeError as error:  # the pool may keep it nevertheless, and execute it later
                if _taken(first) is not None:
                    with self._lock:
                        self._n_executing -= 1
                    refuse(_without_thread(error))

    def _work(self, first: list[Callable[[], None]]) -> None:
        _thread.pool = self
        execute = _taken(first)
        while execute is not None:
            execute()
            execute = None  # releases what it keeps alive
            with self._lock:
                if self._queued and self._n_executing <= self._max_executing:
                    execute, _ = self._queued.popleft()
                else:
                    self._n_executing -= 1


def _taken(first: list[Callable[[], None]]) -> Callable[[], None] | None:
    """Take the one item, unless another thread has."""
    try:
        return first.pop()
    except IndexError:
        return None


def _without_thread(error: RuntimeError) -> ExecutionError:
    found = ExecutionError(
        f"no thread can be started for the callable of a task ({error}): join threads that submit "
        "before the program ends, or let the process have more threads (ulimit -u)"
    )
    found.__cause__ = error
    return found


class Awaited(Protocol):
    """A ticket: what may wait for others, and be waited for."""

    _waits_for: Sequence[Any]

    def done(self) -> bool:
        """Whether it has ended."""
        ...


def in_callable() -> bool:
    """Whether this thread executes the callable of a task."""
    return getattr(_thread, "ticket", None) is not None


def call(
    ticket: Awaited, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Execute the callable of a task, whose ticket is given."""
    _thread.ticket = ticket
    try:
        return function(*args, **kwargs)
    finally:
        _thread.ticket = None


def waiting(awaited: Awaited | None) -> contextlib.AbstractContextManager[None]:
    """Return a context for a wait of this thread: in a callable, another may execute meanwhile.

    Args:
        awaited: what is waited for without a limit of time; None: there is a limit.

    Raises:
        ExecutionError: on entry: it waits, possibly by way of others, for the callable of this
            thread.
    """
    pool: TaskThreads | None = getattr(_thread, "pool", None)
    return contextlib.nullcontext() if pool is None or not in_callable() else _wait(pool, awaited)


@contextlib.contextmanager
def _wait(pool: TaskThreads, awaited: Awaited | None) -> Iterator[None]:
    own: Awaited = _thread.ticket
    own._waits_for = () if awaited is None else (awaited,)  # first: two may wait for each other
    try:
        _refuse_cycle(own)
        with pool.not_counted():
            yield
    finally:
        own._waits_for = ()


def _refuse_cycle(own: Awaited) -> None:
    left, seen = list(own._waits_for), set[int]()
    while left and len(seen) < _MOST_LOOKED_AT:
        one = left.pop()
        if one is own:
            raise ExecutionError(
                "a callable of a task waits for its own ticket, or for one that waits for it, and "
                "neither would end: return first, or give the wait a timeout"
            )
        if id(one) not in seen and not one.done():
            seen.add(id(one))
            left += one._waits_for
