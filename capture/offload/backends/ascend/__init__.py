"""The Ascend backend: a program is one model on the device, its kernel arguments one table."""

from offload.backends.ascend.backend import AscendBackend, Refresh
from offload.backends.ascend.kernels import Address, Capturer, GatherKernel, Kernel, KernelCapture

__all__ = [
    "Address",
    "AscendBackend",
    "Capturer",
    "GatherKernel",
    "Kernel",
    "KernelCapture",
    "Refresh",
]
