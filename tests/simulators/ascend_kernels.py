"""Kernels for the simulated Ascend device: Python functions in an image that its runtime loads.

`AtenCapturer` makes one of each launch's torch operator, so whatever can be recorded runs through
the argument table, a model on the device, and both refreshes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping

import numpy as np
from aten_kernel import AtenKernel

from offload import _native
from offload.backends.ascend import Address, GatherKernel, Kernel, KernelCapture
from offload.program import Program

KERNEL_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p
)
_MAGIC = b"SIMKERN1"


class KernelImage:
    """Python functions as kernels of one loaded binary.

    A function is called with its argument block when the kernel runs. If it raises, the error is
    kept in `errors` and the device fails.
    """

    def __init__(self, device: int, functions: Mapping[str, Callable[[bytes], object]]) -> None:
        self.errors: list[BaseException] = []
        self._callbacks = {name: self._callback(one) for name, one in functions.items()}
        image = _MAGIC + struct.pack("<Q", len(functions))
        for name, callback in self._callbacks.items():
            address = ctypes.cast(callback, ctypes.c_void_p).value
            image += struct.pack("<48sQQQ", name.encode(), address, 0, 0)
        self._binary = _native.AscendBinary(device, image)

    def __getitem__(self, name: str) -> int:
        return self._binary.function(name)

    def _callback(self, function: Callable[[bytes], object]) -> object:
        def run(arguments: int | None, n_bytes: int, _n_blocks: int, _user: int | None) -> int:
            try:
                function(ctypes.string_at(arguments, n_bytes) if n_bytes else b"")
            except BaseException as error:
                self.errors.append(error)
                return 1
            return 0

        return KERNEL_FUNCTION(run)


def _array(address: int, kind: type, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((kind * count).from_address(address))


def gather(block: bytes) -> None:
    """The refresh of an argument table: `args[w] = base[index[w]] + offset[w]`."""
    table, index, offset, count, bases = struct.unpack_from("<5Q", block)
    indices = _array(index, ctypes.c_uint32, count)
    base = _array(bases, ctypes.c_uint64, int(indices.max()) + 1)
    _array(table, ctypes.c_uint64, count)[:] = base[indices] + _array(
        offset, ctypes.c_uint64, count
    )


class AtenCapturer:
    """Implements the Ascend backend's Capturer on the simulated runtime.

    Attributes:
        has_gather: whether the kernel that refreshes tables is there.
        images: what was loaded, for the errors of kernels.
    """

    def __init__(self, *, has_gather: bool = True) -> None:
        self.has_gather = has_gather
        self.images: list[KernelImage] = []

    def capture(self, program: Program, device: int) -> KernelCapture:
        """One kernel for each launch."""
        aten = [AtenKernel(program, launch) for launch in program.launches]
        names = [f"launch {index}" for index in range(len(aten))]
        image = self._load(
            device, {name: one.execute for name, one in zip(names, aten, strict=True)}
        )
        nowhere = dict.fromkeys(range(len(program.values)), 0)
        kernels = [
            Kernel(
                function=image[name],
                n_blocks=1,
                arguments=one.arguments(nowhere),
                addresses=tuple(
                    Address(8 * place, view.value, view.offset_bytes)
                    for place, view in enumerate(one.views, start=1)
                ),
                launch=index,
            )
            for index, (name, one) in enumerate(zip(names, aten, strict=True))
        ]
        return KernelCapture(kernels, keep=image)

    def gather_kernel(self, device: int) -> GatherKernel | None:
        """A kernel in Python."""
        if not self.has_gather:
            return None
        image = self._load(device, {"gather": gather})
        return GatherKernel(image["gather"], 1, image)

    def _load(self, device: int, functions: Mapping[str, Callable[[bytes], object]]) -> KernelImage:
        image = KernelImage(device, functions)
        self.images.append(image)
        return image
