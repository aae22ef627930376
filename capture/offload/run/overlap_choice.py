"""Whether an executable exchanges tensors with other ranks while its launches run, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from offload.console.amounts import show_bytes
from offload.plan.collective_lanes import CollectiveTimes
from offload.plan.overlap_collectives import CollectiveOrder


@dataclasses.dataclass(frozen=True, slots=True)
class OverlapChoice:
    """What became of `load(lanes=...)` for a Program with collectives.

    Attributes:
        asked: 2, or `auto`.
        times: what launches and exchanges of this rank take, in the order that is executed.
        estimated: why these are no measured times; empty where they were measured.
        predicted_ns: of an execution of the order that was found, by simulation, on the slowest
            rank.
        recorded_ns: of the recorded order, likewise.
        lower_bound_ns: no order of this rank's launches takes less.
        method: what found the order.
        n_moved: launches that stand elsewhere in it than they were recorded.
        feature_map_bytes: of the order that was found: buffers of collectives under way are kept.
        recorded_feature_map_bytes: of the recorded order.
        measured_ns: what calls took at the load on the slowest rank, in words; empty where nothing
            was measured.
        is_kept: whether the order that was found is executed, and not the recorded one.
    """

    asked: int | Literal["auto"]
    times: CollectiveTimes
    estimated: str
    predicted_ns: float
    recorded_ns: float
    lower_bound_ns: float
    method: str
    n_moved: int
    feature_map_bytes: int
    recorded_feature_map_bytes: int
    measured_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_kept: bool = False

    def chosen(self, order: CollectiveOrder) -> OverlapChoice:
        """The same, with the order that is executed."""
        times = CollectiveTimes(
            tuple(self.times.launch_ns[one] for one in order.order),
            tuple(self.times.transfer_ns[one] for one in order.order),
        )
        return dataclasses.replace(self, times=times, is_kept=not order.is_recorded)

    def explain(self) -> Iterator[str]:
        """Lines for people."""
        order = "launches in recorded order"
        if self.is_kept:
            order = "collectives are exchanged while launches run"
        yield f"lanes={self.asked!r}: {order}"
        yield (
            f"  predicted: {self.predicted_ns / 1e3:,.1f} us on the slowest rank with "
            f"{self.n_moved} launches moved ({self.method}), {self.recorded_ns / 1e3:,.1f} us in "
            f"recorded order, no order of this rank takes less than "
            f"{self.lower_bound_ns / 1e3:,.1f} us"
        )
        yield (
            f"  feature map: {show_bytes(self.feature_map_bytes)} with launches moved, "
            f"{show_bytes(self.recorded_feature_map_bytes)} in recorded order"
        )
        if self.estimated:
            yield f"  times are estimates from bytes: {self.estimated}"
        for what, ns in self.measured_ns.items():
            yield f"  measured at the load on all ranks, made-up inputs: {what} {ns / 1e3:,.1f} us"
