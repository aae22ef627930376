"""Plans of whole weights: where streamed ones lie in the ring, and when each is copied there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.plan.simulate_streaming import simulate_transfers
from offload.plan.steps import Transfer
from offload.plan.streaming import WeightDemand
from offload.plan.topology import Link

SMALLEST_STREAMED_BYTES = 4096
"""Smaller weights stay: each copy costs the link's overhead, and they weigh little."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What lies in the ring, and the copies of a pass.

    Attributes:
        parts: by position in the demand how many bytes lie in the ring, the last ones of the
            weight, and where.
        transfers: in the order in which they run; `piece` is a position in the demand. What no
            transfer copies stays where it lies.
        ring_bytes: that the parts take.
        period_ns: of a pass, as simulated.
        link: what copies take.
    """

    parts: Mapping[int, tuple[int, int]]
    transfers: tuple[Transfer, ...]
    ring_bytes: int
    period_ns: float
    link: Link

    @property
    def transfer_bytes(self) -> int:
        """That the transfers of a pass copy."""
        return sum(self.parts[one.piece][0] for one in self.transfers)


@dataclasses.dataclass(frozen=True, slots=True)
class WholeWeights:
    """A plan that streams some weights, all of each, and the memory that it takes.

    Attributes:
        required_bytes: of memory that it takes: the ring, and weights that stay outside of it.
        resident_bytes: of the latter.
        largest: position in the demand of the weight that sets the ring: the largest that is read
            when it is fullest; -1 without one.
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
    """A layout of whole weights, and what a pass takes by it.

    Args:
        demand: has the weights.
        offsets_bytes: where in the ring they lie, by position in the demand.
        transfers: in order; `piece` is a position in the demand.
        ring_bytes: of the ring.
        link: what copies take.
    """
    sizes_bytes = [demand.weights[one.piece].size_bytes for one in transfers]
    parts = {index: (demand.weights[index].size_bytes, at) for index, at in offsets_bytes.items()}
    simulated = simulate_transfers(demand.launch_ns, transfers, sizes_bytes, link)
    return Layout(parts, tuple(transfers), ring_bytes, simulated.period_ns, link)


def streamable(demand: WeightDemand) -> list[int]:
    """Positions of the weights that may be streamed, in the order of their first readers."""
    found = [
        index
        for index, one in enumerate(demand.weights)
        if not one.stays and one.size_bytes >= SMALLEST_STREAMED_BYTES
    ]
    return sorted(found, key=lambda index: demand.weights[index].launches[0])
