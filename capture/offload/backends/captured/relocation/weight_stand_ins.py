"""The proof's stand-ins for weights whose content is in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from offload.interpreter.made_up_inputs import (
    has_fractions,
    index_weights,
    stored_indices,
    valid_bytes,
)
from offload.program import BoundProgram, Role, StoredTensor

_TILE_BYTES = 2**20  # content is made once, and repeated


class Memory(Protocol):
    """The operations on device memory that are needed; addresses and sizes in bytes."""

    def allocate(self, size_bytes: int) -> int:
        """Allocate memory that holds zeros."""

    def free(self, address: int) -> None:
        """Free one block."""

    def write(self, address: int, content: bytes) -> None:
        """Copy from the host."""


class WeightStandIns:
    """For each weight an address of its bytes, or of others that are valid for any model.

    Weights in memory are used in place, and so are those that the resident streams. Others in files
    may be too large for the device together: those of one dtype with equally long sums share one
    block, as large as the largest of them, of made-up content. Its numbers are such that a layer
    neither overflows nor gives zeros: see `_largest_number`. Only small integer weights, which may
    be an index, have their own content.

    Attributes:
        addresses: by Value of role weight.
    """

    def __init__(self, bound: BoundProgram, memory: Memory, streamed: Mapping[int, int]) -> None:
        program = bound.program
        self._memory = memory
        self._blocks: list[int] = []
        sizes_bytes: dict[tuple[str, float], int] = {}
        kinds: dict[int, tuple[str, float]] = {}
        own: dict[int, int] = {}
        indices = index_weights(bound.bindings)
        for index in (one for one in bound.bindings.stored if one not in streamed):
            value = program.values[index]
            if index in indices:
                own[index] = self._allocate(value.size_bytes)
                memory.write(own[index], stored_indices(bound.bindings.stored[index]))
                continue
            kind = kinds[index] = (value.dtype, _largest_number(bound.bindings.stored[index]))
            sizes_bytes[kind] = max(sizes_bytes.get(kind, 0), value.size_bytes)
        blocks = {kind: self._block(*kind, size) for kind, size in sizes_bytes.items()}
        others = {
            value.index: blocks[kinds[value.index]]
            if value.index in kinds
            else bound.bindings.weights[value.index][0].untyped_storage().data_ptr()
            for value in program.of_role(Role.WEIGHT)
            if value.index not in streamed and value.index not in own
        }
        self.addresses: Mapping[int, int] = {**others, **own, **streamed}

    def _block(self, dtype: str, below: float, size_bytes: int) -> int:
        address = self._allocate(size_bytes)
        tile_bytes = min(_TILE_BYTES, size_bytes)
        generator = torch.Generator().manual_seed(0)
        tile = valid_bytes(dtype, tile_bytes, generator, below=below)
        for at in range(0, size_bytes, max(1, tile_bytes)):
            self._memory.write(address + at, tile[: size_bytes - at])
        return address

    def _allocate(self, size_bytes: int) -> int:
        address = self._memory.allocate(size_bytes)
        self._blocks.append(address)
        return address

    def free(self) -> None:
        """Free the blocks."""
        for address in self._blocks:
            self._memory.free(address)
        self._blocks.clear()


def _largest_number(stored: StoredTensor) -> float:
    """The bound of a weight's made-up numbers: twice 1/K, where K of them are summed.

    So the results of each layer are as large as its inputs. For a matrix K is the last dimension;
    for several matrices, or a convolution in one dimension, the larger of the last two; for other
    convolutions all but the first. Vectors scale, or are added.
    """
    shape = stored.shape
    if len(shape) < 2 or not has_fractions(stored.dtype):
        return 1.0
    n_summed = math.prod(shape[1:]) if len(shape) > 3 else max(shape[1:])
    return min(1.0, 2 / max(1, n_summed))
