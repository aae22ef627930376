"""The owner of an address in one capture: an allocation, or an owner that keeps memory."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from offload.backends.captured.relocation.captures import GraphCapture, OwnedRange
from offload.backends.captured.relocation.words import WORD_BYTES

_LOWER_HALF = 0xFFFF_FFFF
_FAR_BYTES = 1 << 36
"""The farthest distance of an address from its allocation: as large as a device's memory may be."""


class Layout:
    """The allocations that an address may belong to, in one capture."""

    def __init__(self, capture: GraphCapture, guard_bytes: int) -> None:
        """Sort a capture's allocations, each of which also owns `guard_bytes` around it."""
        order = sorted(
            (one.address, one.size_bytes, index)
            for index, one in enumerate(capture.allocations)
            if one.size_bytes
        )
        self._order = order
        self._guard_bytes = guard_bytes
        self._beyond_bytes = guard_bytes + 1 if guard_bytes else 0
        self._starts = [address for address, _, _ in order]

    def candidates(self, address: int) -> list[tuple[int, int]]:
        """Each (allocation, offset) that the address can mean, for the two nearest allocations."""
        place = bisect.bisect_right(self._starts, address)
        return [
            (index, address - start)
            for start, size_bytes, index in self._order[max(0, place - 1) : place + 1]
            if -self._guard_bytes <= address - start < size_bytes + self._beyond_bytes
        ]


class Meanings:
    """The meanings of a word over all captures: the same allocation and offset in each layout."""

    def __init__(self, captures: Sequence[GraphCapture], guard_bytes: int) -> None:
        """Compare one capture in each of three layouts."""
        self.layouts = [Layout(capture, guard_bytes) for capture in captures]
        allocations = [[one.address for one in capture.allocations] for capture in captures]
        self._addresses = list(zip(*allocations, strict=True))
        self._by_moves: dict[tuple[int, int], list[int]] = {}
        self._by_lower_moves: dict[tuple[int, int], list[int]] = {}
        self._ends = [one.size_bytes + guard_bytes for one in captures[0].allocations]
        self._guard_bytes = guard_bytes
        every = [one for capture in captures for one in capture.allocations]
        self._least = min((one.address for one in every), default=0) - guard_bytes
        self._most = max((one.address + one.size_bytes for one in every), default=0) + guard_bytes
        for index, (first, second, third) in enumerate(self._addresses if guard_bytes else ()):
            if captures[0].allocations[index].size_bytes:
                moves = second - first, third - first
                lower = moves[0] & _LOWER_HALF, moves[1] & _LOWER_HALF
                self._by_moves.setdefault(moves, []).append(index)
                self._by_lower_moves.setdefault(lower, []).append(index)

    def of(self, first: int, second: int, third: int) -> list[tuple[int, int]]:
        """Each (allocation, offset) that explains a word in every layout."""
        near = [
            (index, offset)
            for index, offset in self.layouts[0].candidates(first)
            if self._addresses[index][1:] == (second - offset, third - offset)
        ]
        return near or self._far(first, second, third)

    def at(self, offset: int, contents: Sequence[bytes]) -> list[tuple[int, int]]:
        """The same for a word at a byte of a part, given by the part's content in four captures.

        Whatever the second of them, which is in the first layout too, holds there.
        """
        words = [int.from_bytes(one[offset : offset + WORD_BYTES], "little") for one in contents]
        first, _, second, third = words
        return self.of(first, second, third)

    def _far(self, first: int, second: int, third: int) -> list[tuple[int, int]]:
        """As `of`, far outside an allocation, if there is only one.

        As for a kernel that receives the address of index 0. If allocations have different gaps in
        each layout, only the right one is as far away in all three; of adjacent allocations many
        are.
        """
        found = [
            (index, first - self._addresses[index][0])
            for index in self._by_moves.get((second - first, third - first), ())
        ]
        return found if len(found) == 1 and abs(found[0][1]) <= _FAR_BYTES else []

    def of_lower_half(self, first: int, second: int, third: int) -> list[tuple[int, int]]:
        """Each (allocation, offset) whose address has these bytes as lower half in every layout.

        The upper half must differ: if it is not in the arguments, no kernel has the whole address.
        """
        found = []
        moves = (second - first) & _LOWER_HALF, (third - first) & _LOWER_HALF
        for index in self._by_lower_moves.get(moves, ()):
            offset = (first - self._addresses[index][0]) & _LOWER_HALF
            if offset > self._ends[index]:
                offset -= _LOWER_HALF + 1
            uppers = {(address + offset) >> 32 for address in self._addresses[index]}
            if offset >= -self._guard_bytes and len(uppers) > 1:
                found.append((index, offset))
        return found if len(found) == 1 else []

    def is_of_pool(self, address: int) -> bool:
        """Whether an address belongs to an allocation of some layout."""
        if not self._least <= address <= self._most:
            return False
        return any(layout.candidates(address) for layout in self.layouts)


class Owned:
    """The owners of addresses in one capture."""

    def __init__(self, ranges: Sequence[OwnedRange]) -> None:
        """Sort the owners' ranges by address."""
        self._ranges = sorted(ranges, key=lambda one: one.address)
        self._starts = [one.address for one in self._ranges]

    def candidates(self, address: int) -> list[tuple[str, int]]:
        """Each owner that the address can mean, and the offset into its range.

        The range that contains the address comes first; one past the end of the range before counts
        too. If two ranges are adjacent, a layout in which they are not shows which is meant.
        """
        place = bisect.bisect_right(self._starts, address)
        nearest = reversed(self._ranges[max(0, place - 2) : place])
        return [
            (one.owner, address - one.address)
            for one in nearest
            if address - one.address <= one.size_bytes
        ]
