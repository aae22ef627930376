"""Kernels of a synthetic binary for the simulated Ascend runtime, and their launches."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable

import numpy as np
from ascend_kernels import gather
from ascend_simulator import AscendSimulator

from offload.backends.ascend import BinaryKernel, Given, Made, Number, Tiling
from offload.native import _native
from offload.program import Launch

FLOAT, INT = "float32", "int32"
MOST_TILING_BYTES = 64


def floats(address: int, count: int) -> np.ndarray:
    """Device memory as an array."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def scale(block: bytes, n_blocks: int) -> None:
    """struct { float* from; float factor; float* to; uint32_t count; }, in parts."""
    source, factor, destination, count = struct.unpack("<Qf4xQI4x", block)
    step = math.ceil(count / n_blocks)
    for begin in range(0, count, step):
        part = slice(begin, min(begin + step, count))
        floats(destination, count)[part] = floats(source, count)[part] * np.float32(factor)


def add(block: bytes, n_blocks: int) -> None:
    """struct { uint32_t count; float* first; float* second; float* to; }."""
    assert n_blocks == 1
    count, first, second, destination = struct.unpack("<I4x3Q", block)
    floats(destination, count)[:] = floats(first, count) + floats(second, count)


def negate(block: bytes, n_blocks: int) -> None:
    """struct { float* from; Tiling* tiling; float* to; }: tiles, each with its number of elements.

    struct Tiling { uint32_t n_tiles; uint32_t elements[n_tiles]; }, one tile for each block.
    """
    source, tiling, destination = struct.unpack_from("<3Q", block)
    (n_tiles,) = struct.unpack("<I", ctypes.string_at(tiling, 4))
    elements = struct.unpack(f"<{n_tiles}I", ctypes.string_at(tiling + 4, 4 * n_tiles))
    assert n_tiles == n_blocks
    begin = 0
    for count in elements:
        end = begin + count
        floats(destination, end)[begin:] = -floats(source, end)[begin:]
        begin = end


def n_made(launch: Launch) -> int:
    """The number of elements of the first result."""
    return math.prod(launch.results[0].shape)


def tiles(launch: Launch) -> list[int]:
    """The elements of each tile: 7, or the rest, and more where there are many."""
    step = max(7, -(-n_made(launch) // 10))
    return [min(step, n_made(launch) - begin) for begin in range(0, n_made(launch), step)]


def tile(launch: Launch) -> bytes:
    """The tile in the layout that `negate` reads."""
    elements = tiles(launch)
    return struct.pack(f"<{1 + len(elements)}I", len(elements), *elements)


SCALE = BinaryKernel(
    "scale",
    lambda launch: -(-n_made(launch) // 4),
    (Given(0, FLOAT), Number("f", lambda launch: launch.arguments[1]), Made(0, FLOAT),
     Number("I", n_made)),
)  # fmt: skip
ADD = BinaryKernel(
    "add", lambda launch: min(1, n_made(launch)),
    (Number("I", n_made), Given(0, FLOAT), Given(1, FLOAT), Made(0, FLOAT)),
)  # fmt: skip
NEGATE = BinaryKernel(
    "negate", lambda launch: len(tiles(launch)),
    (Given(0, FLOAT), Tiling(MOST_TILING_BYTES), Made(0, FLOAT)), tile=tile,
)  # fmt: skip
KERNELS = {"aten::mul.Tensor": SCALE, "aten::add.Tensor": ADD, "aten::neg": NEGATE}


def image_of(ascend: AscendSimulator, **others: tuple[int, Callable[[bytes, int], None]]) -> bytes:
    """The binary of these kernels and others."""
    gather_bytes = _native.ASCEND_GATHER_ARGUMENTS_BYTES
    known = {
        "scale": (32, scale),
        "add": (32, add),
        "negate": (24, negate),
        "gather": (gather_bytes, gather),
    }
    return ascend.binary({**known, **others})
