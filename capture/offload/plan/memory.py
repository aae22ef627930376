"""Places values of known lifetimes in one arena. The work is done in native/plan/placement*.cpp."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence

from offload.errors import PlanError
from offload.native import _planner

DEFAULT_SEARCH_STEPS = _planner.DEFAULT_SEARCH_STEPS
"""The search limit for planning a program: at most about a tenth of a second."""

THOROUGH_SEARCH_STEPS = 3_000_000_000
"""The search limit where only memory is planned: at most about ten seconds."""

_LARGEST = 2**63 - 1


def round_up(number: int, unit: int) -> int:
    """The least multiple of the unit that is at least the number."""
    return -(-number // unit) * unit


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A value that exists in the steps [first, last) and then takes `size_bytes`.

    With first == last or no bytes it takes nothing and conflicts with nothing.
    """

    first: int
    last: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where each interval lies.

    Attributes:
        offsets_bytes: one offset for each interval, in the order given.
        arena_bytes: the largest offset plus aligned size.
        lower_bound_bytes: no placement has a smaller arena.
        method: how it was found: a greedy order such as `size first-fit`, or `search`; `empty` if
            no interval takes memory.
        steps: steps of the search; 0 if a greedy order met the bound or the capacity.
    """

    offsets_bytes: tuple[int, ...]
    arena_bytes: int
    lower_bound_bytes: int
    method: str
    steps: int


def place_intervals(
    intervals: Sequence[Interval],
    *,
    alignment_bytes: int = 1,
    capacity_bytes: int | None = None,
    search_steps: int = DEFAULT_SEARCH_STEPS,
) -> Placement:
    """Give every interval an offset so that no two overlap both in time and in bytes.

    Tries a portfolio of greedy orders. If none meets the capacity, or without one the lower bound,
    an exact search follows. Its limit is counted, never timed: the same input gives the same
    placement. The result has passed `check_placement`.

    Args:
        intervals: the values to place.
        alignment_bytes: a power of two. Every offset is a multiple of it, and sizes count as
            rounded up to it.
        capacity_bytes: a sufficient arena size. If no placement meets it, the result is the best
            placement found; the caller compares `arena_bytes`.
        search_steps: visits to values and program steps that the search may make, some three
            nanoseconds each. 0 turns it off.

    Returns:
        The placement with the smallest arena found, or the first to meet the capacity.

    Raises:
        PlanError: an interval has last < first or a negative size, the sizes add up to 2^63 bytes
            or more, or an option is out of range.
    """
    offsets_bytes, arena_bytes, lower_bound, method, steps = _planner.place_intervals(
        *_columns(intervals),
        alignment_bytes=_alignment(alignment_bytes),
        capacity_bytes=None if capacity_bytes is None else min(capacity_bytes, _LARGEST),
        search_steps=min(search_steps, _LARGEST),
    )
    return Placement(tuple(offsets_bytes), arena_bytes, lower_bound, method, steps)


def check_placement(intervals: Sequence[Interval], offsets_bytes: Sequence[int]) -> None:
    """Check a placement from any planner.

    Raises:
        PlanError: two intervals overlap both in time and in bytes (the message names them), an
            offset is negative, the numbers of offsets and intervals differ, or `place_intervals`
            would refuse the intervals.
    """
    _planner.check_placement(*_columns(intervals), _integers(offsets_bytes))


def lower_bound_bytes(intervals: Sequence[Interval], alignment_bytes: int = 1) -> int:
    """Return the bytes that exist in the fullest step, each size rounded up to the alignment.

    Raises:
        PlanError: as `place_intervals`.
    """
    return _planner.lower_bound_bytes(
        *_columns(intervals), alignment_bytes=_alignment(alignment_bytes)
    )


def _alignment(alignment_bytes: int) -> int:
    if not -_LARGEST <= alignment_bytes <= _LARGEST:
        raise PlanError(f"the alignment must be a power of two below 2^63, got {alignment_bytes}")
    return alignment_bytes


def _columns(intervals: Sequence[Interval]) -> tuple[array[int], array[int], array[int]]:
    return (
        _integers(one.first for one in intervals),
        _integers(one.last for one in intervals),
        _integers(one.size_bytes for one in intervals),
    )


def _integers(numbers: Iterable[int]) -> array[int]:
    try:
        return array("q", numbers)
    except OverflowError:
        raise PlanError("steps, sizes and offsets must be below 2^63") from None
