"""Plans of whole weights: the places of streamed weights in the ring, and their copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.plan.simulate_streaming import simulate_transfers
from offload.plan.steps import Transfer
from offload.plan.streaming import WeightDemand
from offload.plan.topology import Link

SMALLEST_STREAMED_BYTES = 4096
"""Smaller weights stay: each copy costs the link's overhead, and they save little memory."""

_ROUNDING = 1e-9
"""Of sums of times in another order, as in native/plan/streaming_search.cpp."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The contents of the ring, and the copies of a pass.

    Attributes:
        parts: by position in the demand, how many bytes of the weight, its last, lie in the ring,
            and where.
        transfers: in the order in which they run; `piece` is a position in the demand. Weights that
            no transfer copies stay in place.
        ring_bytes: the memory of the parts.
        period_ns: the simulated time of a pass; exactly that of the launches where they hide all
            copies, so that rounding never makes a plan with copies the quicker one.
        link: the cost of copies.
    """

    parts: Mapping[int, tuple[int, int]]
    transfers: tuple[Transfer, ...]
    ring_bytes: int
    period_ns: float
    link: Link

    @property
    def transfer_bytes(self) -> int:
        """The bytes that the transfers of a pass copy."""
        return sum(self.parts[one.piece][0] for one in self.transfers)


@dataclasses.dataclass(frozen=True, slots=True)
class WholeWeights:
    """A plan that streams some weights, each as a whole, and the memory that it takes.

    Attributes:
        required_bytes: the memory that it takes: the ring, and weights that stay outside it.
        resident_bytes: the memory of the latter.
        largest: position in the demand of the weight that sets the ring: the largest that is read
            when it is fullest; -1 without a ring.
        layout: the plan.
    """

    required_bytes: int
    resident_bytes: int
    largest: int
    layout: Layout


def simulated_layout(
    demand: WeightDemand,
    offsets_bytes: Mapping[int, int],
    transfers: Sequence[Transfer],
    ring_bytes: int,
    link: Link,
) -> Layout:
    """A layout of whole weights, with its simulated pass.

    Args:
        demand: the demand with the weights.
        offsets_bytes: their places in the ring, by position in the demand.
        transfers: in order; `piece` is a position in the demand.
        ring_bytes: the size of the ring.
        link: the cost of copies.
    """
    sizes_bytes = [demand.weights[one.piece].size_bytes for one in transfers]
    parts = {index: (demand.weights[index].size_bytes, at) for index, at in offsets_bytes.items()}
    period_ns = simulate_transfers(demand.launch_ns, transfers, sizes_bytes, link).period_ns
    compute_ns = simulate_transfers(demand.launch_ns, (), (), link).period_ns
    if period_ns <= compute_ns * (1 + _ROUNDING):
        period_ns = compute_ns
    return Layout(parts, tuple(transfers), ring_bytes, period_ns, link)


def streamable(demand: WeightDemand) -> list[int]:
    """Positions of the weights that may be streamed, in the order of their first readers."""
    found = [
        index
        for index, one in enumerate(demand.weights)
        if not one.stays and one.size_bytes >= SMALLEST_STREAMED_BYTES
    ]
    return sorted(found, key=lambda index: demand.weights[index].launches[0])
