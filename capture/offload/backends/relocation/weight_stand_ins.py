"""What the proof takes for weights whose content is in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from offload.made_up_inputs import NEAR_ZERO, stored_indices, valid_bytes
from offload.program import Program, Role

_TILE_BYTES = 2**20  # content is made once, and repeated


class Memory(Protocol):
    """What is needed of a device's memory; addresses and sizes in bytes."""

    def allocate(self, size_bytes: int) -> int:
        """Memory that holds zeros."""

    def free(self, address: int) -> None:
        """Give one block back."""

    def write(self, address: int, content: bytes) -> None:
        """Copy from the host."""


class WeightStandIns:
    """For each weight an address that holds its bytes, or others that any model can read.

    Weights in memory stand for themselves, and so do those that the resident brings. Others in
    files may be too large for the device all at once: those of one dtype share one block, as large
    as the largest of them, of made-up content. Only small ones of integers, which may be an index,
    have their own content.

    Attributes:
        addresses: by Value of role weight.
    """

    def __init__(self, program: Program, memory: Memory, streamed: Mapping[int, int]) -> None:
        self._memory = memory
        self._blocks: list[int] = []
        sizes_bytes: dict[str, int] = {}
        own: dict[int, int] = {}
        for index in (one for one in program.stored if one not in streamed):
            value = program.values[index]
            indices = stored_indices(program.stored[index])
            if indices is not None:
                own[index] = self._allocate(value.size_bytes)
                memory.write(own[index], indices)
                continue
            sizes_bytes[value.dtype] = max(sizes_bytes.get(value.dtype, 0), value.size_bytes)
        blocks = {dtype: self._block(dtype, size) for dtype, size in sizes_bytes.items()}
        others = {
            value.index: blocks[value.dtype]
            if value.index in program.stored
            else program.weights[value.index][0].untyped_storage().data_ptr()
            for value in program.of_role(Role.WEIGHT)
            if value.index not in streamed and value.index not in own
        }
        self.addresses: Mapping[int, int] = {**others, **own, **streamed}

    def _block(self, dtype: str, size_bytes: int) -> int:
        address = self._allocate(size_bytes)
        tile_bytes = min(_TILE_BYTES, size_bytes)
        generator = torch.Generator().manual_seed(0)
        tile = valid_bytes(dtype, tile_bytes, generator, below=NEAR_ZERO)
        for at in range(0, size_bytes, max(1, tile_bytes)):
            self._memory.write(address + at, tile[: size_bytes - at])
        return address

    def _allocate(self, size_bytes: int) -> int:
        address = self._memory.allocate(size_bytes)
        self._blocks.append(address)
        return address

    def free(self) -> None:
        """Give the blocks back."""
        for address in self._blocks:
            self._memory.free(address)
        self._blocks.clear()
