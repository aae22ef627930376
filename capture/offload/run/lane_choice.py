"""The number of lanes on which an executable runs its launches, and its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from offload.console.amounts import show_count


@dataclasses.dataclass(frozen=True, slots=True)
class LaneChoice:
    """The outcome of `load(lanes=...)`.

    Attributes:
        asked: the maximum number of lanes, or `auto`.
        n_lanes: the number of lanes used.
        threads_of_a_launch: how many threads share a launch; None: torch's setting at each call.
        refusal: why one lane was chosen without examining launches; else empty.
        estimated: why durations of launches are estimates; empty where they were measured.
        kept: whether durations come from former loads (`load(costs=)`).
        predicted_ns: the simulated makespan of an execution's launches on the planned lanes.
        sequential_ns: of all launches on one lane, with one thread each.
        lower_bound_ns: a lower bound for any lanes.
        n_planned: the number of planned lanes.
        n_waits: the waits of an execution between these lanes.
        method: the method that found them.
        measured_ns: the durations of calls at load, in words; empty where nothing was measured.
        gives_way: whether lanes were chosen although torch's threads took about the same time,
            since lanes give way to other processes.
        stalls_after_pauses: whether torch's threads were quicker in one call after the other, and
            not chosen, since they lose more by pauses between calls.
    """

    asked: int | Literal["auto"]
    n_lanes: int = 1
    threads_of_a_launch: int | None = None
    refusal: str = ""
    estimated: str = ""
    kept: bool = False
    predicted_ns: float = 0.0
    sequential_ns: float = 0.0
    lower_bound_ns: float = 0.0
    n_planned: int = 1
    n_waits: int = 0
    method: str = ""
    measured_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gives_way: bool = False
    stalls_after_pauses: bool = False

    def explain(self) -> Iterator[str]:
        """Return lines for people."""
        used = show_count(self.n_lanes, "lane", "lanes")
        if self.refusal:
            yield f"lanes={self.asked!r}: one lane, since {self.refusal}"
            return
        of_a_launch = "as many threads for a launch as torch is set to"
        if self.threads_of_a_launch is not None:
            of_a_launch = "one thread for a launch"
        yield f"lanes={self.asked!r}: {used}, {of_a_launch}"
        yield (
            f"  predicted: {self.predicted_ns / 1e3:,.1f} us on "
            f"{show_count(self.n_planned, 'lane', 'lanes')} with {self.n_waits} waits "
            f"({self.method}), {self.sequential_ns / 1e3:,.1f} us one after the other, no lanes "
            f"take less than {self.lower_bound_ns / 1e3:,.1f} us"
        )
        if self.estimated:
            yield f"  times of launches are estimates from their bytes: {self.estimated}"
        if self.kept:
            yield "  durations of launches were kept from former loads: costs="
        for what, ns in self.measured_ns.items():
            yield f"  measured at the load, calls on made-up inputs: {what} {ns / 1e3:,.1f} us"
        if self.gives_way:
            yield (
                "  torch's threads took about as long, but slow down several times where another "
                "process takes a processor"
            )
        elif self.stalls_after_pauses:
            yield "  torch's threads lose more by pauses between calls than they gain without"
        elif self.measured_ns and self.threads_of_a_launch is None:
            yield (
                "  torch's threads slow down several times where another process takes a "
                "processor; lanes=2 continues with one thread there"
            )
