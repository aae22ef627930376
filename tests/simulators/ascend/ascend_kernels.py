"""Kernels for the simulated Ascend device: Python functions in an image that its runtime loads.

`AtenCapturer` makes a kernel of each launch's torch operator, so all that can be recorded runs
through the argument table, a model on the device, and both refreshes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import numpy as np
from ascend_simulator import AscendSimulator
from aten_kernel import AtenKernel

from offload.backends.ascend import Address, GatherKernel, Kernel, KernelCapture
from offload.native import _native
from offload.program import BoundProgram, Launch, Program


def _array(address: int, kind: type, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((kind * count).from_address(address))


def gather(block: bytes, _n_blocks: int = 1) -> None:
    """The refresh of an argument table: `args[w] = base[index[w]] + offset[w]`."""
    table, index, offset, count, bases = struct.unpack_from("<5Q", block)
    indices = _array(index, ctypes.c_uint32, count)
    base = _array(bases, ctypes.c_uint64, int(indices.max()) + 1)
    _array(table, ctypes.c_uint64, count)[:] = base[indices] + _array(
        offset, ctypes.c_uint64, count
    )


class AtenCapturer:
    """Implements the Ascend backend's Capturer on the simulated runtime.

    Errors that a kernel raises are in the simulator's `errors`.

    Attributes:
        has_gather: whether the kernel that refreshes tables exists.
        on_end: called with each launch whose kernel has run.
        ascend: the simulated runtime.
    """

    def __init__(self, ascend: AscendSimulator, *, has_gather: bool = True) -> None:
        self.has_gather = has_gather
        self.on_end: Callable[[Launch], None] = lambda launch: None
        self.ascend = ascend

    sized = None  # each choice of sizes has separate kernels

    def capture(self, program: Program, device: int) -> KernelCapture:
        """Capture one kernel for each launch."""
        aten = [AtenKernel(BoundProgram(program), launch) for launch in program.launches]
        functions = {
            f"launch {index}": (sum(one.sizes), self._running(one, launch))
            for index, (one, launch) in enumerate(zip(aten, program.launches, strict=True))
        }
        binary = _native.AscendBinary(device, self.ascend.binary(functions))
        nowhere = dict.fromkeys(range(len(program.values)), 0)
        kernels = [
            Kernel(
                function=binary.function(name),
                n_blocks=1,
                arguments=one.arguments(nowhere),
                addresses=tuple(
                    Address(8 * place, view.value, view.offset_bytes)
                    for place, view in enumerate(one.views, start=1)
                ),
                launch=index,
            )
            for index, (name, one) in enumerate(zip(functions, aten, strict=True))
        ]
        return KernelCapture(kernels, keep=binary)

    def _running(self, kernel: AtenKernel, launch: Launch) -> Callable[[bytes, int], None]:
        def run(block: bytes, _n_blocks: int) -> None:
            kernel.execute(block)
            self.on_end(launch)

        return run

    def gather_kernel(self, device: int) -> GatherKernel | None:
        """Return the kernel that refreshes tables, in Python."""
        return gather_kernel(self.ascend, device) if self.has_gather else None


def gather_kernel(ascend: AscendSimulator, device: int = 0) -> GatherKernel:
    """Return the kernel that refreshes tables."""
    binary = _native.AscendBinary(
        device, ascend.binary({"gather": (_native.ASCEND_GATHER_ARGUMENTS_BYTES, gather)})
    )
    return GatherKernel(binary.function("gather"), 1, binary)
