"""Weights whose addresses are constants, so that what writes them writes them where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from offload.backends.captured.opaque_weights import device_weights
from offload.backends.captured.relocation.captures import OwnedRange
from offload.program import BoundProgram, Value

WEIGHT_OWNER = "weight "
"""What the owner of a weight's memory is called before its name."""


class Memory(Protocol):
    """What is needed of a device's memory; addresses and sizes in bytes."""

    def allocate(self, size_bytes: int) -> int:
        """Memory of its own."""

    def free(self, address: int) -> None:
        """Give one block back."""

    def read(self, address: int, size_bytes: int) -> bytes:
        """Copy to the host."""

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy on the device."""


def weight_ranges(bound: BoundProgram) -> list[OwnedRange]:
    """The memory of an opaque Program's weights, which constant words may point into."""
    program = bound.program
    if program.opaque is None:
        return []
    return [
        OwnedRange(storage.data_ptr(), storage.nbytes(), WEIGHT_OWNER + value.name)
        for value in device_weights(program)
        for storage in [bound.bindings.weights[value.index][0].untyped_storage()]
    ]


class FixedWeights:
    """Copies of weights that executions may write where they are, to put back.

    Attributes:
        content: by name the bytes that the latest execution left.
    """

    def __init__(
        self,
        bound: BoundProgram,
        memory: Memory,
        values: Sequence[Value],
        streamed: Mapping[int, int],
    ) -> None:
        """Copy the weights `values` of the Program, those `streamed` from the address there."""
        self.content: dict[str, bytes] = {}
        self._memory = memory
        self._kept: list[tuple[int, int, Value]] = []
        for value in values:
            original = (
                streamed[value.index]
                if value.index in streamed
                else bound.bindings.weights[value.index][0].untyped_storage().data_ptr()
            )
            copy = memory.allocate(value.size_bytes)
            memory.copy(copy, original, value.size_bytes)
            self._kept.append((original, copy, value))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Execute in the block: what it leaves is read and then undone, also if it fails."""
        try:
            yield
            self.content = {f"{value.name} ({value.index})": self._read(original, value)
                            for original, _, value in self._kept}  # fmt: skip
        except BaseException:
            with contextlib.suppress(Exception):  # of a device that has failed
                self._put_back()
            raise
        self._put_back()

    def _read(self, original: int, value: Value) -> bytes:
        """By way of a block of this memory, which is sure to be readable."""
        block = self._memory.allocate(value.size_bytes)
        self._memory.copy(block, original, value.size_bytes)
        content = self._memory.read(block, value.size_bytes)
        self._memory.free(block)
        return content

    def _put_back(self) -> None:
        for original, copy, value in self._kept:
            self._memory.copy(original, copy, value.size_bytes)

    def free(self) -> None:
        """Give the copies back."""
        for _, copy, _ in self._kept:
            self._memory.free(copy)
        self._kept.clear()
