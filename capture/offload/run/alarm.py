"""A thread of the process that calls functions at given times."""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from weakref import WeakMethod

_NS = 1_000_000_000


class Alarm:
    """Calls methods at times, if their objects are still alive.

    Owner: the process; a forked child starts its own thread. Thread: any.
    """

    def __init__(self) -> None:
        """Begin without a thread: the first call starts it."""
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, WeakMethod[Callable[[], None]]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def call_at(self, at_ns: float, method: WeakMethod[Callable[[], None]]) -> None:
        """Call a method at a time of `time.monotonic_ns`, on the alarm's thread."""
        if self._process != os.getpid():
            self._begin()
        with self._changed:
            heapq.heappush(self._waiting, (at_ns, next(self._numbers), method))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offload-alarm", daemon=True)
                self._thread.start()
            elif self._waiting[0][2] is method:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                left_ns = self._waiting[0][0] - time.monotonic_ns()
                if left_ns > 0:
                    self._changed.wait(left_ns / _NS)
                    continue
                method = heapq.heappop(self._waiting)[2]()
            if method is not None:
                try:
                    method()
                except Exception:  # told as that of any thread; other methods have their times
                    thread = threading.current_thread()
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
            del method


ALARM = Alarm()
