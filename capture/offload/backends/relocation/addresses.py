"""Whose an address is, in one capture: an allocation's, or that of an owner which keeps memory."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from offload.backends.relocation.captures import GraphCapture, OwnedRange


class Layout:
    """Which allocations an address may belong to, in one capture."""

    def __init__(self, capture: GraphCapture, guard_bytes: int) -> None:
        """Sort a capture's allocations, each of which owns so many bytes around it as well."""
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
        """Each (allocation, offset) that the address can mean: of the two that are nearest."""
        place = bisect.bisect_right(self._starts, address)
        return [
            (index, address - start)
            for start, size_bytes, index in self._order[max(0, place - 1) : place + 1]
            if -self._guard_bytes <= address - start < size_bytes + self._beyond_bytes
        ]


class Owned:
    """Which owner keeps an address, in one capture."""

    def __init__(self, ranges: Sequence[OwnedRange]) -> None:
        """Sort what owners keep by address."""
        self._ranges = sorted(ranges, key=lambda one: one.address)
        self._starts = [one.address for one in self._ranges]

    def find(self, address: int) -> tuple[str, int] | None:
        """The owner, and the offset into what it keeps; one past its end counts."""
        place = bisect.bisect_right(self._starts, address)
        if not place:
            return None
        one = self._ranges[place - 1]
        offset_bytes = address - one.address
        return (one.owner, offset_bytes) if offset_bytes <= one.size_bytes else None
