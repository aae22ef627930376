"""Buckets: ranges of sizes for which Values have the same places in the feature map."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.errors import BindingError, PlanError
from offload.plan import Place, Plan
from offload.plan.memory import Placement
from offload.plan.place_lifetimes import place_lifetimes
from offload.program import Program
from offload.program.expressions import expressions
from offload.program.family import MOST, Dim, Family
from offload.program.varying_numbers import expression_of

# Bounds of all activations that exceed their bytes at the greatest sizes by this factor are not
# worth their memory.
_LOOSEST = 4

# A bucket is placed while a call waits: at most some three milliseconds, where no greedy order
# meets the lower bound.
_SEARCH_STEPS = 1_000_000


def bucket_ends(dim: Dim, given: Sequence[int] = ()) -> list[int]:
    """Return the ends of a Dim's buckets, inclusive, up to its greatest size.

    Args:
        dim: the Dim.
        given: the user's ends; beyond the last, and without any, half steps: 1, 2, 3, 4, 6, 8, 12,
            16, 24 and so on.
    """
    most = MOST if dim.maximum is None else dim.maximum
    ends = [0, 1, *(one for at in range(1, 62) for one in (2**at, 3 * 2 ** (at - 1)))]
    first = max(given, default=-1)
    chosen = [*given, *(one for one in ends if one > first)]
    return sorted({one for one in chosen if one < most} | {most})


class Buckets:
    """Places a Family's activations by buckets. Owner: one executable. Thread: one at a time.

    Live ranges and slots do not depend on sizes: only bytes do.

    Attributes:
        feature_map_bytes: of the largest bucket so far.
    """

    def __init__(self, family: Family, program: Program, plan: Plan) -> None:
        """Take a Family's Program, which has this Plan at the recorded sizes."""
        feature_map = plan.feature_map.index
        self.feature_map_bytes = 0
        self._plan = plan
        self._program = program
        self._numbers = expressions(len(family.dims), family.expressions)
        self._placed = [
            index
            for index, place in enumerate(plan.places)
            if place is not None and place.slot == feature_map
        ]

    def place(
        self, sizes: Sequence[int], least: Sequence[int], greatest: Sequence[int]
    ) -> tuple[list[int], list[int], int, bool]:
        """Return where Values lie in a bucket.

        Args:
            sizes: of the call.
            least: the least size of each Dim in the bucket.
            greatest: the greatest size of each Dim in the bucket.

        Returns:
            The offset of each Value in the feature map, the bytes reserved for it, the bytes of the
            feature map, and whether this holds for the whole bucket or only for `sizes`.

        Raises:
            PlanError: the activations have no size in bytes.
        """
        rooms = self._rooms(least, greatest)
        reached = self._rooms(greatest, greatest)
        is_of_bucket = (
            rooms is not None and reached is not None and sum(rooms) <= _LOOSEST * sum(reached)
        )
        chosen = rooms if is_of_bucket else self._rooms(sizes, sizes)
        if chosen is None:
            raise PlanError(f"the activations have no size in bytes at {tuple(sizes)}")
        placement = self._placement(chosen)
        self.feature_map_bytes = max(self.feature_map_bytes, placement.arena_bytes)
        offsets, room = [0] * len(self._program.values), [MOST] * len(self._program.values)
        for index, offset, n_bytes in zip(
            self._placed, placement.offsets_bytes, chosen, strict=True
        ):
            offsets[index], room[index] = offset, n_bytes
        return offsets, room, placement.arena_bytes, is_of_bucket

    def plan_between(self, least: Sequence[int], greatest: Sequence[int]) -> Plan | None:
        """Return the Plan of a bucket at its bounds; None where these are unknown."""
        rooms = self._rooms(least, greatest)
        if rooms is None:
            return None
        placement = self._placement(rooms)
        places, slot = list(self._plan.places), self._plan.feature_map
        for index, offset in zip(self._placed, placement.offsets_bytes, strict=True):
            places[index] = Place(slot.index, offset)
        slots = list(self._plan.slots)
        slots[slot.index] = dataclasses.replace(slot, size_bytes=placement.arena_bytes)
        return dataclasses.replace(
            self._plan,
            slots=tuple(slots),
            places=tuple(places),
            feature_map_bytes=placement.arena_bytes,
            lower_bound_bytes=placement.lower_bound_bytes,
            method=placement.method,
        )

    def _placement(self, rooms: Sequence[int]) -> Placement:
        return place_lifetimes(
            [self._plan.lifetimes[index] for index in self._placed],
            rooms,
            alignment_bytes=self._plan.alignment_bytes,
            search_steps=_SEARCH_STEPS,
        )

    def _rooms(self, least: Sequence[int], greatest: Sequence[int]) -> list[int] | None:
        """Return the upper bound of each feature map Value's bytes; None where unknown."""
        found = []
        for index in self._placed:
            size_bytes = self._program.values[index].size_bytes
            expression = expression_of(size_bytes)
            if expression is None:
                found.append(size_bytes)
                continue
            try:
                most = self._numbers.greatest(expression, list(least), list(greatest))
            except BindingError:
                return None
            if not 0 <= most < MOST:
                return None
            found.append(int(most))
        return found
