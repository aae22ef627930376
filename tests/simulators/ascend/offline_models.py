"""An offline model that adds its inputs and its weights, and device tensors for it."""

from __future__ import annotations

import ctypes
import struct

import torch
from ascend_offline import INPUT, NONE, OUTPUT, WEIGHT, WORK, Operand, Task, Tensor, pack_model

COUNT = 4
N_BYTES = 4 * COUNT


def floats(address):
    return (ctypes.c_float * COUNT).from_address(address)


def add(block, _n_blocks):
    """destination = one + other, and an integer that must not be patched."""
    destination, one, other, look_alike = struct.unpack("<4Q", block)
    assert look_alike == 0x7F40_0000_1000
    floats(destination)[:] = [a + b for a, b in zip(floats(one), floats(other), strict=True)]


def write_model(ascend, path, *, inputs=None, outputs=None):
    """x + weights goes through the feature map; that plus y is the output; weights are 1 to 4."""
    constant = Operand(NONE, offset_bytes=0x7F40_0000_1000)
    tensors = [Tensor(name, (2, 2), N_BYTES) for name in ("x", "y")]
    content = pack_model(
        ascend,
        inputs=inputs or tensors,
        outputs=outputs or [Tensor("z", (2, 2), N_BYTES)],
        kernels=[add],
        tasks=[
            Task(0, (Operand(WORK), Operand(INPUT, 0), Operand(WEIGHT), constant)),
            Task(0, (Operand(OUTPUT, 0), Operand(WORK), Operand(INPUT, 1), constant)),
        ],
        work_bytes=64,
        weights=struct.pack("<4f", 1, 2, 3, 4),
    )
    path.write_bytes(content)
    return path


WEIGHTS = torch.arange(1.0, 5.0).view(2, 2)


def on_device(ascend, values):
    """The values in device memory: an offline model takes no other buffers."""
    address = ascend.make("aclrtMalloc", N_BYTES, 0)
    memory = (ctypes.c_char * N_BYTES).from_address(address)
    tensor = torch.frombuffer(memory, dtype=torch.float32).view(2, 2)
    return tensor.copy_(values)
