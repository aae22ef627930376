"""Whether an executable overlaps exchanges with other ranks and its launches, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from offload.console.amounts import show_bytes
from offload.plan.collective_lanes import CollectiveTimes
from offload.plan.overlap_collectives import CollectiveOrder


@dataclasses.dataclass(frozen=True, slots=True)
class OverlapChoice:
    """The outcome of `load(lanes=...)` for a Program with collectives.

    Attributes:
        asked: 2, or `auto`.
        times: the durations of this rank's launches and exchanges, in executed order.
        estimated: why these are estimates; empty where they were measured.
        predicted_ns: the simulated duration of an execution in the order found, on the slowest
            rank.
        recorded_ns: the same in the recorded order.
        lower_bound_ns: a lower bound for any order of this rank's launches.
        method: the method that found the order.
        n_moved: the launches whose place differs from the recorded one.
        feature_map_bytes: in the order found: buffers of running collectives are kept.
        recorded_feature_map_bytes: in the recorded order.
        measured_ns: the durations of calls at load on the slowest rank, in words; empty where
            nothing was measured.
        is_kept: whether the order found is executed instead of the recorded one.
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
        """Return the same choice with the order that is executed."""
        times = CollectiveTimes(
            tuple(self.times.launch_ns[one] for one in order.order),
            tuple(self.times.transfer_ns[one] for one in order.order),
        )
        return dataclasses.replace(self, times=times, is_kept=not order.is_recorded)

    def explain(self) -> Iterator[str]:
        """Return lines for people."""
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
