"""Places Values by their lifetimes: intervals of one chain of steps, or a partial order."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from offload.native import _planner
from offload.plan.memory import (
    DEFAULT_SEARCH_STEPS,
    Interval,
    Placement,
    check_placement,
    place_intervals,
)
from offload.plan.plan import Lifetime


def place_lifetimes(
    lifetimes: Sequence[Lifetime],
    sizes_bytes: Sequence[int],
    *,
    alignment_bytes: int,
    search_steps: int = DEFAULT_SEARCH_STEPS,
) -> Placement:
    """Give every Value an offset so that no two with overlapping lifetimes share bytes.

    Args:
        lifetimes: over the same chains; one chain is placed by `place_intervals`, several by
            native/plan/partial_placement.cpp, whose result need not be the least.
        sizes_bytes: of the Values.
        alignment_bytes: a power of two; every offset is a multiple of it.
        search_steps: the limit of a search.

    Raises:
        PlanError: as `place_intervals`.
    """
    if not any(one.beside for one in lifetimes):
        return place_intervals(
            _intervals(lifetimes, sizes_bytes),
            alignment_bytes=alignment_bytes,
            search_steps=search_steps,
        )
    offsets_bytes, arena_bytes, lower_bound, method, steps = _planner.place_partial(
        *_columns(lifetimes, sizes_bytes),
        alignment_bytes=alignment_bytes,
        search_steps=search_steps,
    )
    return Placement(tuple(offsets_bytes), arena_bytes, lower_bound, method, steps)


def check_lifetimes(
    lifetimes: Sequence[Lifetime], sizes_bytes: Sequence[int], offsets_bytes: Sequence[int]
) -> None:
    """Check a placement from any planner.

    Raises:
        PlanError: two Values with overlapping lifetimes share bytes, or an offset is negative.
    """
    if any(one.beside for one in lifetimes):
        columns = _columns(lifetimes, sizes_bytes)
        _planner.check_partial_placement(*columns, array("q", offsets_bytes))
    else:
        check_placement(_intervals(lifetimes, sizes_bytes), offsets_bytes)


def _intervals(lifetimes: Sequence[Lifetime], sizes_bytes: Sequence[int]) -> list[Interval]:
    return [
        Interval(one.first, one.last, size_bytes)
        for one, size_bytes in zip(lifetimes, sizes_bytes, strict=True)
    ]


def _columns(
    lifetimes: Sequence[Lifetime], sizes_bytes: Iterable[int]
) -> tuple[int, array[int], array[int], array[int]]:
    n_chains = max(len(one.chains) for one in lifetimes)
    empty = ((0, 0),) * n_chains
    chains = [one.chains if one.beside else empty for one in lifetimes]
    return (
        n_chains,
        array("q", (first for one in chains for first, _ in one)),
        array("q", (last for one in chains for _, last in one)),
        array("q", sizes_bytes),
    )
