"""The stream of captures on each GPU, by capturing thread."""

from __future__ import annotations

import functools
import os

import torch

from offload.backends.cuda.driver import call, driver_bindings


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of captures on a GPU; for the capture thread.

    It is not one of torch's, which hands out the same 32 streams in turn: a user's stream could be
    the same, and its work would end a capture or be captured. It stays for the life of the process:
    handles of libraries may remember the stream that they were last given, and torch's allocator
    identifies memory by its address.

    Raises:
        OutOfMemory: the driver has no memory for it.
        ExecutionError: the driver failed.
    """
    flags = driver_bindings().CUstream_flags.CU_STREAM_NON_BLOCKING.value
    before = call("cuCtxGetCurrent")
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device)))
    try:
        handle = call("cuStreamCreate", flags)
    finally:
        call("cuCtxSetCurrent", before)
    return torch.cuda.ExternalStream(int(handle), torch.device("cuda", device))


def end_capture(stream: int) -> None:
    """End what the driver still captures on a stream, by its handle; without errors.

    For a capture that torch could not end: nothing could be captured on the stream any more.
    """
    driver = driver_bindings()
    handle = driver.CUstream(init_value=stream)
    code, status = driver.cuStreamIsCapturing(handle)
    if int(code) or not int(status):
        return
    code, graph = driver.cuStreamEndCapture(handle)
    if not int(code) and int(graph):
        driver.cuGraphDestroy(graph)


# CUDA lets the child of a fork use none of its parent's streams.
os.register_at_fork(after_in_child=capture_stream.cache_clear)
