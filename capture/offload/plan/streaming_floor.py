"""The least memory for streaming weights that are copied once in a pass."""

from __future__ import annotations

import itertools

from offload.plan.memory import Interval, place_intervals, round_up
from offload.plan.steps import Transfer
from offload.plan.streaming import WeightDemand
from offload.plan.topology import Link
from offload.plan.whole_weights import WholeWeights, simulated_layout, streamable


def floor_plan(demand: WeightDemand, link: Link, alignment_bytes: int) -> WholeWeights:
    """The plan that copies each weight just before its first reader: copies and launches alternate.

    A weight exists from the end of the launch before its first reader to the end of its last
    reader. If all weights fit in as much memory, they are resident, and the ring is empty. No plan
    that copies each weight once in a pass takes less.

    Raises:
        PlanError: the sizes add up to 2^63 bytes or more.
    """
    sizes_bytes = [round_up(one.size_bytes, alignment_bytes) for one in demand.weights]
    order = streamable(demand)
    uses = [demand.weights[index] for index in order]
    # Offsets are sums of sizes, so they have the same alignment.
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
        Transfer(index, one.launches[0], *_launch_before(one.launches[0], demand))
        for index, one in zip(order, uses, strict=True)
    ]
    offsets_bytes = dict(zip(order, placement.offsets_bytes, strict=True))
    return WholeWeights(
        required_bytes=placement.arena_bytes + resident_bytes,
        resident_bytes=resident_bytes,
        largest=_largest(order, demand),
        layout=simulated_layout(demand, offsets_bytes, transfers, placement.arena_bytes, link),
    )


def _launch_before(launch: int, demand: WeightDemand) -> tuple[int, int]:
    return (launch - 1, 0) if launch else (len(demand.launch_ns) - 1, -1)


def _all_resident(demand: WeightDemand, link: Link, size_bytes: int) -> WholeWeights:
    sizes_bytes = [one.size_bytes for one in demand.weights]
    return WholeWeights(
        required_bytes=size_bytes,
        resident_bytes=size_bytes,
        largest=sizes_bytes.index(max(sizes_bytes)) if sizes_bytes else -1,
        layout=simulated_layout(demand, {}, (), 0, link),
    )


def _largest(order: list[int], demand: WeightDemand) -> int:
    """The largest weight that exists when the most bytes do; among equals the first."""
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
