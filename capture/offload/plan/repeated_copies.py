"""Plans that copy a weight more than once in a pass, for launches far apart that read it.

A block that all layers share (ALBERT, arXiv 1909.11942, section 3.1) is read from the first layer
to the last one. Copied once, it occupies its memory all the time, so the least memory is that of
the whole block. Copied for each use, it makes room for other weights in between.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence

from offload.plan.memory import round_up
from offload.plan.steps import Transfer
from offload.plan.streaming import WeightDemand
from offload.plan.topology import Link
from offload.plan.whole_weights import WholeWeights, simulated_layout, streamable

_DEPTHS = (1, 2, 4)
"""Numbers of launches that read streamed weights between the begin of a copy and its reader."""

_N_LEVELS = 6
"""Numbers of resident weights to try."""


def repeated_plans(
    demand: WeightDemand, link: Link, alignment_bytes: int
) -> tuple[WholeWeights, ...]:
    """A family of such plans, in ascending memory, independent of the budget.

    Its members differ in which weights stay (those first that would be copied most often, in
    ascending and in descending size) and in how early copies begin. In each, first fit finds the
    weights that take turns at a place, the largest first, and a copy begins as soon as the
    overwritten weight has been read.

    Returns:
        An empty family where no weight has readers between which others read other weights.
    """
    order = streamable(demand)
    if not _is_read_apart(order, demand):
        return ()
    sizes_bytes = [round_up(one.size_bytes, alignment_bytes) for one in demand.weights]
    planner = _Planner(demand, link, sizes_bytes)
    found = {
        (frozenset(streamed), depth): None
        for streamed in _streamed_sets(order, planner)
        for depth in _DEPTHS
    }
    plans = (planner.plan(sorted(streamed), depth) for streamed, depth in found)
    return tuple(one for one in plans if one is not None)


def _is_read_apart(order: Sequence[int], demand: WeightDemand) -> bool:
    readers = _readers(order, demand)
    number = {launch: at for at, launch in enumerate(readers)}
    return any(
        number[later] > number[launch] + 1
        for index in order
        for launch, later in itertools.pairwise(demand.weights[index].launches)
    )


def _readers(streamed: Sequence[int], demand: WeightDemand) -> list[int]:
    """The launches that read some of these weights, ascending."""
    return sorted({launch for index in streamed for launch in demand.weights[index].launches})


def _streamed_sets(order: Sequence[int], planner: _Planner) -> Iterator[list[int]]:
    """Yield all streamable weights, then fewer and fewer of them."""
    uses = planner.uses(order, depth=1)
    by_size = sorted(order, key=lambda index: planner.sizes_bytes[index])
    for one in (by_size, by_size[::-1]):
        stay_first = sorted(one, key=lambda index: -len(uses[index]))
        for level in range(_N_LEVELS):
            yield stay_first[level * len(order) // _N_LEVELS :]


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """Consecutive launches for which a weight is copied once: from the first to the last reader.

    Attributes:
        begin: its bytes are reserved from this launch on; below zero: of the previous pass.
    """

    begin: int
    first: int
    last: int

    def steps(self, n_launches: int) -> int:
        """The launches of a pass during which its bytes are reserved, as bits."""
        if self.begin >= 0:
            return _bits(self.begin, self.last + 1)
        return _bits(n_launches + self.begin, n_launches) | _bits(0, self.last + 1)


def _bits(begin: int, end: int) -> int:
    return ((1 << max(0, end - begin)) - 1) << begin


@dataclasses.dataclass(frozen=True, slots=True)
class _Tenant:
    """A weight in the ring: its place, and when its bytes are reserved."""

    index: int
    offset_bytes: int
    size_bytes: int
    steps: int
    uses: tuple[_Use, ...]

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Planner:
    """Attributes: `sizes_bytes`, of each weight, are aligned."""

    demand: WeightDemand
    link: Link
    sizes_bytes: Sequence[int]

    @property
    def n_launches(self) -> int:
        return len(self.demand.launch_ns)

    def plan(self, streamed: Sequence[int], depth: int) -> WholeWeights | None:
        """The plan at this depth; None if too few launches read these weights for it."""
        if depth > len(_readers(streamed, self.demand)):
            return None
        tenants = self._placed(streamed, depth)
        ring_bytes = max(one.end_bytes for one in tenants)
        resident_bytes = sum(self.sizes_bytes) - sum(one.size_bytes for one in tenants)
        offsets_bytes = {one.index: one.offset_bytes for one in tenants}
        return WholeWeights(
            required_bytes=ring_bytes + resident_bytes,
            resident_bytes=resident_bytes,
            largest=self._largest(streamed),
            layout=simulated_layout(
                self.demand, offsets_bytes, self._transfers(tenants), ring_bytes, self.link
            ),
        )

    def uses(self, streamed: Sequence[int], depth: int) -> dict[int, list[_Use]]:
        """By weight its uses, far enough apart for an early copy in between."""
        readers = _readers(streamed, self.demand)
        begins = {}
        for at, launch in enumerate(readers):
            before, passes = readers[at - depth], int(at < depth)
            begins[launch] = before + 1 - passes * self.n_launches
        found: dict[int, list[_Use]] = {}
        for index in streamed:
            uses = found[index] = []
            for launch in self.demand.weights[index].launches:
                if uses and begins[launch] <= uses[-1].last + 1:
                    uses[-1] = dataclasses.replace(uses[-1], last=launch)
                else:
                    uses.append(_Use(begins[launch], launch, launch))
        return found

    def _placed(self, streamed: Sequence[int], depth: int) -> list[_Tenant]:
        """Place by first fit: the largest first, each at the lowest bytes that are free then."""
        uses = self.uses(streamed, depth)
        placed: list[_Tenant] = []  # by offset
        for index in sorted(streamed, key=lambda one: (-self.sizes_bytes[one], one)):
            size_bytes = self.sizes_bytes[index]
            steps = functools.reduce(
                operator.or_, (one.steps(self.n_launches) for one in uses[index])
            )
            at = 0
            for other in placed:
                if other.steps & steps and at + size_bytes > other.offset_bytes:
                    at = max(at, other.end_bytes)
            tenant = _Tenant(index, at, size_bytes, steps, tuple(uses[index]))
            bisect.insort(placed, tenant, key=lambda one: one.offset_bytes)
        return placed

    def _transfers(self, tenants: Sequence[_Tenant]) -> list[Transfer]:
        """Transfers in the order of their readers, so that no copy waits for its own reader."""
        sharing = _sharing(tenants)
        kept = {one.index: _kept(one, others) for one, others in zip(tenants, sharing, strict=True)}
        found = []
        for one, others in zip(tenants, sharing, strict=True):
            ends = sorted({use.last for each in (one, *others) for use in kept[each.index]})
            for use in kept[one.index] if others else ():
                before = bisect.bisect_left(ends, use.first)
                step = ends[before - 1] if before else ends[-1] - self.n_launches
                found.append((use.first, step, one.index))
        return [
            Transfer(index, first, step % self.n_launches, step // self.n_launches)
            for first, step, index in sorted(found)
        ]

    def _largest(self, streamed: Sequence[int]) -> int:
        """The largest weight of the launch that reads most; among equals the first."""
        reads: dict[int, list[int]] = {}
        for index in streamed:
            for launch in self.demand.weights[index].launches:
                reads.setdefault(launch, []).append(index)
        fullest = max(reads.values(), key=lambda read: sum(self.sizes_bytes[one] for one in read))
        return max(fullest, key=lambda index: self.sizes_bytes[index])


def _sharing(tenants: Sequence[_Tenant]) -> list[list[_Tenant]]:
    """For each tenant, given in the order of offsets, those that share bytes with it."""
    found: list[list[_Tenant]] = [[] for _ in tenants]
    reaching: list[int] = []
    for at, one in enumerate(tenants):
        reaching = [before for before in reaching if tenants[before].end_bytes > one.offset_bytes]
        for before in reaching:
            found[before].append(one)
            found[at].append(tenants[before])
        reaching.append(at)
    return found


def _kept(tenant: _Tenant, others: Sequence[_Tenant]) -> list[_Use]:
    """Its uses, joined where its bytes are not taken in between.

    The first use of a pass is always copied: in the first pass nothing is there.
    """
    taken = functools.reduce(operator.or_, (one.steps for one in others), 0)
    uses = [tenant.uses[0]]
    for use in tenant.uses[1:]:
        if taken & _bits(uses[-1].last + 1, use.begin):
            uses.append(use)
        else:
            uses[-1] = dataclasses.replace(uses[-1], last=use.last)
    return uses
