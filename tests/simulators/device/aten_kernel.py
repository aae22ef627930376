"""A launch's torch operator as a kernel, run on the tensors at the addresses in its arguments."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from offload.interpreter.torch_names import find_dtype, find_overload, symbol_object
from offload.program import BoundProgram, Launch, Symbol, TensorView

# An integer that resembles an address, and is the same in every capture.
LOOK_ALIKE = 0x7F40_0000_1000


# Space for a host constant's value among a kernel's arguments; the size of the largest dtype.
IMMEDIATE_BYTES = 16


def tensor_at(address: int, view: TensorView, size_bytes: int) -> torch.Tensor:
    """A view of a Value that begins at an address of simulated device memory."""
    memory = (ctypes.c_char * max(1, size_bytes)).from_address(address)
    content = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
    tensor = torch.empty(0, dtype=find_dtype(view.dtype))
    offset = view.offset_bytes // tensor.element_size()
    tensor.set_(content.untyped_storage(), offset, view.shape, view.strides)
    if view.conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if view.negative else tensor


class AtenKernel:
    """The kernel of one launch, in place of the compiled operator.

    Its parameters are a look-alike integer, an address for each tensor argument and result on the
    device, a structure of 16 bytes whose middle is padding, and the value of each host constant.
    """

    def __init__(self, bound: BoundProgram, launch: Launch) -> None:
        self.program = bound.program
        self._bindings = bound.bindings
        self._launch = launch
        self.views = tuple(
            view for view in (*launch.views(), *launch.made()) if not self._is_on_host(view)
        )
        self._immediates = [view for view in launch.views() if self._is_on_host(view)]
        self.sizes = (8, *(8 for _ in self.views), 16, *(IMMEDIATE_BYTES for _ in self._immediates))

    def arguments(self, addresses: dict[int, int]) -> bytes:
        """The argument block at these addresses of Values; its padding differs each time."""
        words = [LOOK_ALIKE, *(addresses[view.value] + view.offset_bytes for view in self.views)]
        block = b"".join(word.to_bytes(8, "little") for word in words)
        block += (7).to_bytes(4, "little") + os.urandom(4) + (9).to_bytes(8, "little")
        contents = (self.program.values[view.value].host_content for view in self._immediates)
        return block + b"".join(one.ljust(IMMEDIATE_BYTES, b"\0") for one in contents if one)

    def _is_on_host(self, view: TensorView) -> bool:
        return self.program.values[view.value].on_host

    def execute(self, block: bytes) -> None:
        """Run the operator on the tensors at the addresses in an argument block."""
        words = [int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)]
        assert words[0] == LOOK_ALIKE, "somebody patched an integer"
        tensors = [
            tensor_at(word - view.offset_bytes, view, self.program.values[view.value].size_bytes)
            for word, view in zip(words[1:], self.views, strict=False)
        ]
        begin = len(block) - IMMEDIATE_BYTES * len(self._immediates)
        numbers = [
            torch.frombuffer(
                bytearray(block[begin + IMMEDIATE_BYTES * index :]), dtype=find_dtype(view.dtype)
            )[0]
            for index, view in enumerate(self._immediates)
        ]
        with torch.no_grad():
            self._call(iter(tensors), iter(numbers))

    def _call(self, tensors: Any, numbers: Any) -> None:
        schema = find_overload(self._launch.name)._schema
        positional, named = [], {}
        for one, argument in zip(schema.arguments, self._launch.arguments, strict=True):
            value = self._argument(argument, tensors, numbers)
            if one.kwarg_only:
                named[one.name] = value
            else:
                positional.append(value)
        outcome = find_overload(self._launch.name)(*positional, **named)
        outcomes = outcome if isinstance(outcome, (list, tuple)) else [outcome]
        for result, made in zip(self._launch.results, outcomes, strict=False):
            if result is not None:
                next(tensors).copy_(made)

    def _argument(self, argument: Any, tensors: Any, numbers: Any) -> Any:
        if isinstance(argument, TensorView):
            return next(numbers if self._is_on_host(argument) else tensors)
        if isinstance(argument, tuple):
            return [self._argument(item, tensors, numbers) for item in argument]
        if isinstance(argument, Symbol):
            return symbol_object(argument, self._bindings)
        return argument
