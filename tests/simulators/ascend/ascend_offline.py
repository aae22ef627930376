"""Writes the offline models of the simulated Ascend runtime, which stand in for .om files.

The format is that of ascend/offline_format.hpp. Kernels are named by their address in this process:
only the process that wrote a file can use it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_simulator import AscendSimulator

FLOAT, FORMAT_ND = 0, 2
WORK, WEIGHT, INPUT, OUTPUT, NONE = range(5)


@dataclass(frozen=True)
class Tensor:
    """An input or output: its name, shape, and size in bytes; aclDataType and aclFormat."""

    name: str
    shape: tuple[int, ...]
    n_bytes: int
    data_type: int = FLOAT
    format: int = FORMAT_ND

    def pack(self) -> bytes:
        """Return its record in the file."""
        shape = [*self.shape, *[0] * (8 - len(self.shape))]
        head = struct.pack("<64sii", self.name.encode(), self.data_type, self.format)
        return head + struct.pack("<QQ8q", self.n_bytes, len(self.shape), *shape)


@dataclass(frozen=True)
class Operand:
    """One argument word: the address of a region plus an offset, or (region NONE) the offset."""

    region: int
    index: int = 0
    offset_bytes: int = 0

    def pack(self) -> bytes:
        """Return its record in the file."""
        return struct.pack("<QQQ", self.region, self.index, self.offset_bytes)


@dataclass(frozen=True)
class Task:
    """A launch of the kernel of this number with one argument word for each operand."""

    kernel: int
    operands: tuple[Operand, ...]
    n_blocks: int = 1

    def pack(self) -> bytes:
        """Return its record in the file, with its operands' records."""
        head = struct.pack("<QQQ", self.kernel, self.n_blocks, len(self.operands))
        return head + b"".join(operand.pack() for operand in self.operands)


def pack_model(
    ascend: AscendSimulator,
    *,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    kernels: Sequence[Callable[[bytes, int], object]],
    tasks: Sequence[Task],
    work_bytes: int,
    weights: bytes,
) -> bytes:
    """Return a model's bytes. Kernels are called as those of AscendSimulator.binary."""
    counts = (len(inputs), len(outputs), len(kernels), len(tasks))
    entries = [
        struct.pack("<48sQQ", f"kernel_{number}".encode(), ascend.kernel_address(kernel), 0)
        for number, kernel in enumerate(kernels)
    ]
    head = struct.pack("<8s6Q", b"SIMMODL1", work_bytes, len(weights), *counts)
    records = [part.pack() for part in (*inputs, *outputs)]
    return b"".join([head, *records, *entries, *(task.pack() for task in tasks), weights])
