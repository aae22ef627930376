"""torch's guard of CUDA devices, where torch was built for CUDA and finds no device.

A FakeTensorMode that is entered there replaces the guard in torch's registry by one without devices
(`ensureCUDADeviceGuardSet` of c10/core/impl/DeviceGuardImplInterface.cpp). In torch 2.11 that one
belongs to the thread, and is destroyed when the thread ends; the registry still names it, and its
next use, such as the next mode, crashes the process.
"""

from __future__ import annotations

import functools

import torch

from offload.native import _native


@functools.cache
def keep_cuda_guard() -> None:
    """Let torch's guard last as long as the process; called before fake tensors are used.

    torch keeps a guard that counts devices, as this one does, so that once is enough. Thread: any.
    """
    if not torch.cuda.is_available():
        _native.keep_cuda_guard()
