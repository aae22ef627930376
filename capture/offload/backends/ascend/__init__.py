"""The Ascend backend: a program is one model on the device, its kernel arguments one table."""

from offload.backends.ascend.backend import AscendBackend
from offload.backends.ascend.binary_kernels import (
    BinaryCapturer,
    BinaryKernel,
    Given,
    Made,
    Number,
    Tiling,
)
from offload.backends.ascend.captured_model import CapturedModel
from offload.backends.ascend.kernels import (
    Address,
    Capturer,
    GatherKernel,
    Kernel,
    KernelCapture,
    OwnAddress,
    SizedKernels,
)
from offload.backends.ascend.refresh import Refresh
from offload.backends.ascend.torch_backend import TorchAscendBackend
from offload.backends.ascend.torch_capture import TorchCapturer

__all__ = [
    "Address",
    "AscendBackend",
    "BinaryCapturer",
    "BinaryKernel",
    "CapturedModel",
    "Capturer",
    "GatherKernel",
    "Given",
    "Kernel",
    "KernelCapture",
    "Made",
    "Number",
    "OwnAddress",
    "Refresh",
    "SizedKernels",
    "Tiling",
    "TorchAscendBackend",
    "TorchCapturer",
]
