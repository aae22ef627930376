"""Compares the contents of a device's memory on the device, in chunks, with little memory.

For two contents that must have the same bits, the first differing byte is reported. Content that is
only compared with its former state is not kept but summed, chunk by chunk: two sums of its words,
in one of which each word is weighted by its place. All weights are odd, so that a single changed
word always shows, and other changes are missed once in 2**64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from offload.interpreter.torch_names import find_dtype
from offload.program import ITEM_BYTES

CHUNK_BYTES = 2**23
"""The bytes compared at once; comparing numbers takes up to 16 times as much memory."""

_WORD_BYTES = 8
_STEP = 0x3C6EF372FE94F82A  # even: twice 2**64 over the golden ratio, modulo 2**64


class ComparedMemory(Protocol):
    """The operations on device memory that comparing needs; addresses and sizes in bytes."""

    def allocate(self, size_bytes: int) -> int:
        """Allocate separate memory."""

    def free(self, address: int) -> None:
        """Free one block."""

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy on the device."""

    def chunks(self, address: int, size_bytes: int, chunk_bytes: int) -> Iterator[torch.Tensor]:
        """Its bytes (uint8) in order, in chunks of `chunk_bytes`; each valid until the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Memory that is compared.

    Attributes:
        name: unique, for messages.
        address, size_bytes: its place.
        dtype: of the numbers there; "" if it has several, or none that can be subtracted.
    """

    name: str
    address: int
    size_bytes: int
    dtype: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The distances between the numbers of two contents.

    Attributes:
        largest: of all distances; infinite if only one of a pair is a number.
        mean_square: of all distances.
        n_apart: the number of numbers with different bits.
    """

    largest: float = 0.0
    mean_square: float = 0.0
    n_apart: int = 0

    def joined(self, other: Spread) -> Spread:
        """The larger value of each."""
        return Spread(
            max(self.largest, other.largest),
            max(self.mean_square, other.mean_square),
            max(self.n_apart, other.n_apart),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A place where a content is not as expected.

    Attributes:
        name: of the stretch.
        offset_bytes: of the first byte that differs.
        spread: the distances between the numbers, if some distance is allowed; else None.
    """

    name: str
    offset_bytes: int
    spread: Spread | None = None


class Kept:
    """A copy of stretches on the device, to compare others with. Owner: the caller of `free`.

    Attributes:
        stretches: the copies, with the names of the originals.
    """

    def __init__(self, memory: ComparedMemory, stretches: Sequence[Stretch]) -> None:
        """Copy them.

        Raises:
            OutOfMemory: the device has no memory for it.
        """
        self._memory = memory
        self.stretches: list[Stretch] = []
        for one in stretches:
            address = memory.allocate(one.size_bytes)
            self.stretches.append(dataclasses.replace(one, address=address))
            memory.copy(address, one.address, one.size_bytes)

    def difference(
        self, others: Sequence[Stretch], allowed: Mapping[str, Spread]
    ) -> Difference | None:
        """The first of the same stretches elsewhere that differs from the kept one.

        Args:
            others: one for each kept stretch, in order.
            allowed: by name the distances that numbers may have; all else must have the same bits.
        """
        for one, other in zip(self.stretches, others, strict=True):
            place = first_difference(self._memory, one, other)
            if place is None:
                continue
            limit = allowed.get(one.name)
            if limit is None:
                return Difference(one.name, place)
            found = spread(self._memory, one, other)
            if found.largest > limit.largest or found.mean_square > limit.mean_square:
                return Difference(one.name, place, found)
        return None

    def spreads(self, others: Sequence[Stretch]) -> dict[str, Spread]:
        """By name the distances between the numbers of stretches with different bits."""
        return {
            one.name: spread(self._memory, one, other)
            for one, other in zip(self.stretches, others, strict=True)
            if first_difference(self._memory, one, other) is not None
        }

    def free(self) -> None:
        """Free the copies."""
        for one in self.stretches:
            self._memory.free(one.address)
        self.stretches.clear()


class Summed:
    """Sums over stretches, which show whether these have changed since."""

    def __init__(self, memory: ComparedMemory, stretches: Sequence[Stretch]) -> None:
        self._memory = memory
        self._stretches = tuple(stretches)
        self._weights = torch.empty(0, dtype=torch.int64)
        self._sums = [self._sums_of(one) for one in stretches]

    def change(self) -> Difference | None:
        """The first stretch that has changed; its place is the begin of the changed chunk."""
        for one, before in zip(self._stretches, self._sums, strict=True):
            after = self._sums_of(one)
            if after != before:
                pairs = zip(before, after, strict=True)
                chunk = next(place for place, (old, new) in enumerate(pairs) if old != new)
                return Difference(one.name, chunk * CHUNK_BYTES)
        return None

    def _sums_of(self, stretch: Stretch) -> list[tuple[int, int, int]]:
        chunks = self._memory.chunks(stretch.address, stretch.size_bytes, CHUNK_BYTES)
        return [self._of_chunk(chunk) for chunk in chunks]

    def _of_chunk(self, chunk: torch.Tensor) -> tuple[int, int, int]:
        n_words = chunk.numel() // _WORD_BYTES
        words = chunk[: n_words * _WORD_BYTES].view(torch.int64)
        if self._weights.numel() < n_words or self._weights.device != chunk.device:
            places = torch.arange(n_words, dtype=torch.int64, device=chunk.device)
            self._weights = places * _STEP + 1
        rest = int.from_bytes(bytes(chunk[n_words * _WORD_BYTES :].tolist()), "little")
        return int(words.sum()), int((words * self._weights[:n_words]).sum()), rest


def first_difference(memory: ComparedMemory, one: Stretch, other: Stretch) -> int | None:
    """The first byte at which two stretches of one size differ; None if they are equal."""
    begin = 0
    for first, second in _pairs(memory, one, other):
        differs = first != second
        if bool(differs.any()):
            return begin + int(differs.to(torch.uint8).argmax())
        begin += first.numel()
    return None


def spread(memory: ComparedMemory, one: Stretch, other: Stretch) -> Spread:
    """The distances between two stretches of one size and dtype."""
    largest, square_sum, n_apart, n_items = 0.0, 0.0, 0, 0
    for first, second in _pairs(memory, one, other):
        if not one.dtype:
            return Spread(math.inf, math.inf, int((first != second).sum()))
        item_bytes = ITEM_BYTES[one.dtype]
        same = (first == second).view(-1, item_bytes).all(dim=1)
        distances = (_numbers(first, one.dtype) - _numbers(second, one.dtype)).abs()
        distances = distances.view(same.numel(), -1).amax(dim=1)
        distances = distances.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, float(distances.max()))
        square_sum += float(distances.square().sum())
        n_apart += int(same.logical_not().sum())
        n_items += same.numel()
    return Spread(largest, square_sum / max(1, n_items), n_apart)


def _pairs(
    memory: ComparedMemory, one: Stretch, other: Stretch
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    firsts = memory.chunks(one.address, one.size_bytes, CHUNK_BYTES)
    seconds = memory.chunks(other.address, other.size_bytes, CHUNK_BYTES)
    return zip(firsts, seconds, strict=True)


def _numbers(content: torch.Tensor, dtype_name: str) -> torch.Tensor:
    """The numbers that bytes hold, in double precision; for complex ones the parts, interleaved."""
    numbers = content.view(find_dtype(dtype_name))
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    return numbers.to(torch.float64)
