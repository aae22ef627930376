"""A torch_npu kernel for the probes: a product, taken from a captured model."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

from acl_calls import AclError
from model_tasks import KERNEL, parameters_of, tasks_of, type_of
from probe_device import COUNT, Device
from probing import NotAnswered, ProbeFailed

FEATURE_NOT_SUPPORTED = 207000


@dataclass(frozen=True)
class _Captured:
    """The only task of a captured model: result = left * right, all of COUNT floats."""

    model: int
    function: int
    n_blocks: int
    address: int
    block: bytes
    tensors: tuple[Any, Any, Any]
    keep: Any

    def words(self) -> tuple[int, ...]:
        count = len(self.block) // 8
        return struct.unpack_from(f"<{count}Q", self.block)


@dataclass(frozen=True)
class Product:
    """A captured model of one kernel, result = left * right, and the meaning of its arguments.

    Attributes:
        captured: the model, its kernel, and the address at which the device reads the arguments.
        places: by left, right and result, the word of the arguments that holds the address.
        own_words: words that point into the block itself.
    """

    captured: _Captured
    places: tuple[int, int, int]
    own_words: tuple[int, ...]

    @property
    def right(self) -> Any:
        """The tensor that is never moved."""
        return self.captured.tensors[1]

    @property
    def result(self) -> Any:
        """The tensor that the captured model writes."""
        return self.captured.tensors[2]

    def arguments_at(self, address: int, left: Any = None, result: Any = None) -> bytes:
        """Return the arguments for a block at another address, with other tensors where given."""
        content = list(self.captured.words())
        for place, tensor in ((self.places[0], left), (self.places[2], result)):
            if tensor is not None:
                content[place] = tensor.data_ptr()
        for place in self.own_words:
            content[place] += address - self.captured.address
        packed = struct.pack(f"<{len(content)}Q", *content)
        return packed + self.captured.block[len(packed) :]


def captured_product(device: Device) -> Product:
    """Capture a product with torch_npu and read its task.

    It is captured twice with other tensors: arguments also hold integers that resemble addresses.

    Raises:
        NotAnswered: tasks cannot be read here.
        ProbeFailed: the model is not one kernel, or a tensor is not one word of its arguments.
    """
    first, second = _capture(device), _capture(device)
    pairs = list(zip(first.words(), second.words(), strict=True))
    places = []
    for one, other in zip(first.tensors, second.tensors, strict=True):
        held = [
            index for index, pair in enumerate(pairs) if pair == (one.data_ptr(), other.data_ptr())
        ]
        if len(held) != 1:
            raise ProbeFailed(f"{len(held)} words of the kernel's arguments hold a tensor")
        places.append(held[0])
    own_words = tuple(
        index
        for index, (word, other) in enumerate(pairs)
        if word - first.address == other - second.address
        and 0 <= word - first.address < len(first.block)
    )
    return Product(first, (places[0], places[1], places[2]), own_words)


def _capture(device: Device) -> _Captured:
    import torch

    left, right, result = (
        torch.arange(COUNT, dtype=torch.float32).add_(first).npu() for first in (1, 2, 0)
    )
    torch.mul(left, right, out=result)
    torch.npu.synchronize()
    graph, status, model = torch.npu.NPUGraph(), ctypes.c_int(), ctypes.c_uint64()
    with torch.npu.graph(graph):
        torch.mul(left, right, out=result)
        stream = torch.npu.current_stream().npu_stream
        device.call("aclmdlRICaptureGetInfo", stream, ctypes.byref(status), ctypes.byref(model))
    tasks = [task for of_stream in tasks_of(device, model.value) for task in of_stream]
    if [type_of(device, task) for task in tasks] != [KERNEL]:
        raise ProbeFailed(f"a captured product is {len(tasks)} tasks, not one kernel")
    try:
        kernel = parameters_of(device, tasks[0]).content.kernel
    except AclError as error:
        if error.code != FEATURE_NOT_SUPPORTED:
            raise
        raise NotAnswered("the firmware has no software SQ, so that tasks are not read") from error
    return _Captured(
        model=model.value,
        function=kernel.function,
        n_blocks=kernel.n_blocks,
        address=kernel.arguments,
        block=device.download(kernel.arguments, kernel.arguments_bytes),
        tensors=(left, right, result),
        keep=graph,
    )
