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

    def candidates(self, address: int) -> list[tuple[str, int]]:
        """Each owner that the address can mean, and the offset into what it keeps.

        Who keeps what lies there comes first; one past the end of what lies before counts too. Of
        two that lie side by side, which is meant shows where they do not.
        """
        place = bisect.bisect_right(self._starts, address)
        nearest = reversed(self._ranges[max(0, place - 2) : place])
        return [
            (one.owner, address - one.address)
            for one in nearest
            if address - one.address <= one.size_bytes
        ]
