"""Buckets: ranges of sizes for which Values lie at the same places of the feature map."""

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

# Bounds of all activations together that are so many times what the greatest sizes take are not
# worth their memory.
_LOOSEST = 4

# A bucket is placed while a call waits: some three milliseconds at the worst, where no greedy order
# meets the lower bound.
_SEARCH_STEPS = 1_000_000


def bucket_ends(dim: Dim, given: Sequence[int] = ()) -> list[int]:
    """Where the buckets of a Dim end, both ends included, up to its greatest size.

    Args:
        dim: the size.
        given: where they end by a user's choice; beyond the last one, and without any, by half
            steps: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.
    """
    most = MOST if dim.maximum is None else dim.maximum
    ends = [0, 1, *(one for at in range(1, 62) for one in (2**at, 3 * 2 ** (at - 1)))]
    first = max(given, default=-1)
    chosen = [*given, *(one for one in ends if one > first)]
    return sorted({one for one in chosen if one < most} | {most})


class Buckets:
    """Places what a Family does, bucket by bucket. Owner: one executable. Thread: one at a time.

    When Values exist does not depend on sizes, and neither do slots: only how much they take does.

    Attributes:
        feature_map_bytes: the most that a bucket has taken so far.
    """

    def __init__(self, family: Family, program: Program, plan: Plan) -> None:
        """Of a Family that does this Program, which has this Plan at the recorded sizes."""
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
        """Where Values lie in a bucket.

        Args:
            sizes: that are met.
            least: of each Dim in the bucket.
            greatest: likewise.

        Returns:
            By Value its offset in the feature map and the room that it has there, the bytes of the
            feature map, and whether that holds for the whole bucket, and not for `sizes` alone.

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
        """The Plan of a bucket at its bounds; None where these are not known."""
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
        """The most bytes that each Value of the feature map may have; None: nothing is known."""
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
