"""The least memory with which weights can be streamed, and the plan that takes it."""

from __future__ import annotations

import dataclasses
import itertools

from offload.plan.memory import Interval, place_intervals, round_up
from offload.plan.simulate_streaming import simulate_transfers
from offload.plan.steps import Transfer
from offload.plan.streaming import Link, WeightDemand, WeightUse

SMALLEST_STREAMED_BYTES = 4096
"""Smaller weights stay: each copy costs the link's overhead, and they weigh little."""


@dataclasses.dataclass(frozen=True, slots=True)
class FloorPlan:
    """Every weight is brought just before its first reader: copies and launches take turns.

    Attributes:
        required_bytes: of memory that it takes; no plan takes less.
        ring_bytes, resident_bytes: of which.
        largest: position in the demand of the weight that sets the ring; -1 without one.
        order: positions of weights in the demand, as their transfers run.
        offsets_bytes: where each of them lies in the ring.
        after_steps: the launch that each waits for, of the same pass; -1: the last of the pass
            before.
        period_ns: of a pass, as simulated.
    """

    required_bytes: int
    ring_bytes: int
    resident_bytes: int
    largest: int
    order: tuple[int, ...]
    offsets_bytes: tuple[int, ...]
    after_steps: tuple[int, ...]
    period_ns: float


def floor_plan(demand: WeightDemand, link: Link, alignment_bytes: int) -> FloorPlan:
    """Find the least memory: that of weights that stay, and of those that exist at once.

    A weight exists from the end of the launch before its first reader to the end of its last one.
    If all weights resident take no more memory than that, they are, and the ring is empty.

    Raises:
        PlanError: the sizes add up to 2^63 bytes or more.
    """
    sizes_bytes = [round_up(one.size_bytes, alignment_bytes) for one in demand.weights]
    order = [index for index, one in enumerate(demand.weights) if _may_be_streamed(one)]
    order.sort(key=lambda index: demand.weights[index].launches[0])
    uses = [demand.weights[index] for index in order]
    # Offsets are sums of sizes, so they are aligned as these are.
    placement = place_intervals(
        [
            Interval(one.launches[0], one.launches[-1] + 1, sizes_bytes[index])
            for index, one in zip(order, uses, strict=True)
        ]
    )
    resident_bytes = sum(sizes_bytes) - sum(sizes_bytes[index] for index in order)
    if placement.arena_bytes + resident_bytes >= sum(sizes_bytes):
        return _all_resident(demand, link, sum(sizes_bytes))
    transfers = [
        Transfer(0, one.launches[0], *_launch_before(one.launches[0], demand)) for one in uses
    ]
    simulated = simulate_transfers(
        demand.launch_ns, transfers, [one.size_bytes for one in uses], link
    )
    return FloorPlan(
        required_bytes=placement.arena_bytes + resident_bytes,
        ring_bytes=placement.arena_bytes,
        resident_bytes=resident_bytes,
        largest=_largest(order, demand),
        order=tuple(order),
        offsets_bytes=placement.offsets_bytes,
        after_steps=tuple(one.launches[0] - 1 for one in uses),
        period_ns=simulated.period_ns,
    )


def _may_be_streamed(weight: WeightUse) -> bool:
    return not weight.stays and weight.size_bytes >= SMALLEST_STREAMED_BYTES


def _launch_before(launch: int, demand: WeightDemand) -> tuple[int, int]:
    return (launch - 1, 0) if launch else (len(demand.launch_ns) - 1, -1)


def _all_resident(demand: WeightDemand, link: Link, size_bytes: int) -> FloorPlan:
    sizes_bytes = [one.size_bytes for one in demand.weights]
    return FloorPlan(
        required_bytes=size_bytes,
        ring_bytes=0,
        resident_bytes=size_bytes,
        largest=sizes_bytes.index(max(sizes_bytes)) if sizes_bytes else -1,
        order=(),
        offsets_bytes=(),
        after_steps=(),
        period_ns=simulate_transfers(demand.launch_ns, (), (), link).period_ns,
    )


def _largest(order: list[int], demand: WeightDemand) -> int:
    """Of the weights that exist when the most bytes do, the largest; of equals the first."""
    changes = [0] * (len(demand.launch_ns) + 1)
    for index in order:
        weight = demand.weights[index]
        changes[weight.launches[0]] += weight.size_bytes
        changes[weight.launches[-1] + 1] -= weight.size_bytes
    live_bytes = list(itertools.accumulate(changes))
    fullest = live_bytes.index(max(live_bytes))
    there = [
        index
        for index in order
        if demand.weights[index].launches[0] <= fullest <= demand.weights[index].launches[-1]
    ]
    return max(there, key=lambda index: demand.weights[index].size_bytes)
