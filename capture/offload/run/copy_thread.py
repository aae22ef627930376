"""Threads that copy. They take work until the executions that need it have ended."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

from offload.errors import ExecutionError


class CopyThread:
    """Calls functions in order, on one thread.

    `concurrent.futures` takes no work once the main thread has ended, although other threads still
    execute then. This thread is a daemon, so that the interpreter does not wait for it before
    executions have ended: `close_copy_threads` ends it afterwards.

    Owner: Links. Thread: any. It ends when it is closed or dropped, and the work before that is
    done.
    """

    def __init__(self, name: str) -> None:
        """Start the thread.

        Raises:
            RuntimeError: it cannot be started.
        """
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(
            target=_call_each, args=(self._work,), name=name, daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._work.put, None).atexit = False
        _alive.add(self)

    def submit(self, function: Callable[[], None]) -> None:
        """Call a function, which raises nothing, after the earlier ones.

        Raises:
            ExecutionError: the thread is closed.
        """
        with self._lock:
            if self._closed:
                raise ExecutionError("the executable is closed, or the interpreter is exiting")
            self._work.put(function)

    def close(self) -> None:
        """Take no more work, and wait for the earlier one; in its own functions, do not wait."""
        with self._lock:
            if not self._closed:
                self._work.put(None)
            self._closed = True
        if self._thread is not threading.current_thread():
            self._thread.join()


_alive: weakref.WeakSet[CopyThread] = weakref.WeakSet()
os.register_at_fork(after_in_child=_alive.clear)  # they do not exist in the child


def close_copy_threads() -> None:
    """Close all of them, at the exit of the interpreter."""
    for one in list(_alive):
        one.close()


def _call_each(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (function := work.get()) is not None:
        function()
        del function  # it keeps memory, and the next one may come much later
