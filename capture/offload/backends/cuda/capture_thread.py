"""The thread of a process on which captures are made, and its stream on each GPU.

One thread for all captures: torch keeps cuDNN's plans by thread (`thread_local` caches in
ATen/native/cudnn/Conv_v8.cpp and MHA.cpp), so that each new one would build all of them again, and
cuBLAS's handles belong to a thread as well. Nobody else uses it, and what a model leaves set on it
(autocast, a default device) is put back after each capture.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from offload.backends.cuda.graph import call, driver_bindings
from offload.errors import CaptureError, ExecutionError

T = TypeVar("T")


class _Thread:
    """The thread, which begins with the first capture."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Another one, in the child of a fork."""
        self.executor = concurrent.futures.ThreadPoolExecutor(1, "offload-capture")
        self.inside = threading.local()


_thread = _Thread()


def run_on_capture_thread(work: Callable[[], T]) -> T:
    """What `work` gives there; whoever comes while it is busy waits.

    Raises:
        CaptureError: the caller is on this thread, as a model that loads another when it is called.
        ExecutionError: the interpreter is ending, or no thread can be started.
    """
    if getattr(_thread.inside, "active", False):
        raise CaptureError(
            "a program is being loaded inside of another one's capture, for which it would wait: "
            "load it before"
        )

    def inside() -> T:
        _thread.inside.active = True
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
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
        # An interrupt comes to the caller alone: the capture holds the state of generators.
        if not future.cancel():
            concurrent.futures.wait([future])
        raise
    finally:
        del future


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The stream on a GPU that captures are made on; for the capture thread.

    It is no one of torch's, which gives the same 32 to everybody in turn, so that a user's could be
    it, whose work would end a capture or be captured. It stays as long as the process does: handles
    of libraries may remember the stream that they were last given, and torch's allocator knows
    memory by its address.

    Raises:
        OutOfMemory: the driver has no memory for it.
        ExecutionError: it failed.
    """
    flags = driver_bindings().CUstream_flags.CU_STREAM_NON_BLOCKING.value
    before = call("cuCtxGetCurrent")
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device)))
    try:
        handle = call("cuStreamCreate", flags)
    finally:
        call("cuCtxSetCurrent", before)
    return torch.cuda.ExternalStream(int(handle), torch.device("cuda", device))


def _forget() -> None:
    """The child of a fork has no such thread; of its parent's streams CUDA lets it use none."""
    _thread.renew()
    capture_stream.cache_clear()


os.register_at_fork(after_in_child=_forget)
