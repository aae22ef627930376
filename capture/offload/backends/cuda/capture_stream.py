"""The stream on each GPU on which captures are made, by the thread that makes them."""

from __future__ import annotations

import functools
import os

import torch

from offload.backends.cuda.graph import call, driver_bindings


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


# Of its parent's streams CUDA lets the child of a fork use none.
os.register_at_fork(after_in_child=capture_stream.cache_clear)
