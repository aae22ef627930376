"""Work that an interrupt does not leave half done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from offload.interpreter.cuda_guard import keep_cuda_guard

T = TypeVar("T")


def uninterrupted(work: Callable[[], T]) -> T:
    """Run work in a separate thread, which continues if an interrupt ends the wait for it.

    Modules that an interrupt leaves partly imported stay broken for the life of the process, and
    Inductor imports while it works. It also enters a FakeTensorMode, in a thread that ends.
    """
    keep_cuda_guard()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="offload-compile").start()
    return future.result()
