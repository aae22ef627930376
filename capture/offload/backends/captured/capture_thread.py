"""The thread of a process on which captures are made.

There is one thread for all captures: torch keeps cuDNN's plans by thread (`thread_local` caches in
ATen/native/cudnn/Conv_v8.cpp and MHA.cpp), so each new thread would build all of them again, and
cuBLAS's handles belong to a thread as well. Captures run one at a time, since they borrow what the
process has once: the memory source of torch's allocator, and the states of generators. Nothing else
uses the thread, and what a model leaves set on it (autocast, a default device) is reset after each
capture.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from offload.errors import CaptureError, ExecutionError

T = TypeVar("T")


class _Thread:
    """The thread, which starts with the first capture."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Replace the thread, in the child of a fork."""
        self.executor = concurrent.futures.ThreadPoolExecutor(1, "offload-capture")
        self.inside = threading.local()


_thread = _Thread()


def run_on_capture_thread(work: Callable[[], T], device_type: str) -> T:
    """Run `work` there and return its result; callers wait while the thread is busy.

    Args:
        work: makes the capture.
        device_type: of the devices; autocast is disabled for it.

    Raises:
        CaptureError: the caller is on this thread, as with a model that loads another when called.
        ExecutionError: the interpreter is ending, or no thread can be started.
    """
    if getattr(_thread.inside, "active", False):
        raise CaptureError(
            "a program is being loaded inside the capture of another program, and would wait for "
            "that capture: load it before"
        )

    def inside() -> T:
        _thread.inside.active = True
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast(device_type, enabled=False):
                return work()
        finally:
            if torch.get_default_device().type != "cpu":
                torch.set_default_device(None)
            _thread.inside.active = False

    try:
        future = _thread.executor.submit(inside)
    except RuntimeError as error:
        raise ExecutionError(f"nothing can be captured any more: {error}") from None
    try:
        return future.result()
    except BaseException:
        # An interrupt affects only the caller: the capture holds the state of generators.
        if not future.cancel():
            concurrent.futures.wait([future])
        raise
    finally:
        del future


def may_capture(device_type: str) -> bool:
    """Whether the calling thread may have something captured for devices of this type, and wait.

    Not on the capture thread, and not while torch's current stream is being captured.
    """
    if getattr(_thread.inside, "active", False):
        return False
    return device_type == "cpu" or not _is_capturing(device_type)


def _is_capturing(device_type: str) -> bool:
    module: Any = torch.get_device_module(device_type)
    return bool(module.is_current_stream_capturing())


def refuse_capturing(device_type: str) -> None:
    """Refuse a caller that is capturing, before any query that would end its capture.

    Raises:
        CaptureError: a graph is being captured on torch's current stream of devices of this type.
    """
    if _is_capturing(device_type):
        raise CaptureError(
            "a graph is being captured on the current stream: load the program before the capture "
            "begins"
        )


os.register_at_fork(after_in_child=_thread.renew)  # a child lacks the thread
