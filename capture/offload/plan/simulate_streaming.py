"""Passes of a plan of weight streaming, simulated: one lane computes, one copies, both in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.native import _planner
from offload.plan.simulate_steps import simulate_steps
from offload.plan.steps import Transfer, n_copied_ahead
from offload.plan.streaming import Gather, Link, Streaming, WeightDemand


@dataclasses.dataclass(frozen=True, slots=True)
class StreamingPass:
    """One pass once the first ones are over.

    Times are in ns from the end of the last launch of the pass before, so what is copied early
    for this pass begins before zero.

    Attributes:
        period_ns: when its last launch ends.
        launch_begin_ns, launch_end_ns: of each launch.
        transfer_begin_ns, transfer_end_ns: of each transfer.
    """

    period_ns: float
    launch_begin_ns: tuple[float, ...]
    launch_end_ns: tuple[float, ...]
    transfer_begin_ns: tuple[float, ...]
    transfer_end_ns: tuple[float, ...]

    @property
    def wait_ns(self) -> tuple[float, ...]:
        """For each launch how long it waits for its weights after the one before has ended."""
        ends = (0.0, *self.launch_end_ns)
        return tuple(begin - end for begin, end in zip(self.launch_begin_ns, ends, strict=False))


def simulate_streaming(demand: WeightDemand, streaming: Streaming, link: Link) -> StreamingPass:
    """Run passes, the first from an empty ring, until two in a row take the same time.

    At least three and at most sixteen; the last one is returned. Launches that gather rows wait
    for them after all else.

    Raises:
        PlanError: as `simulate_steps`.
    """
    waits_ns = [0.0] * len(demand.launch_ns)
    for gather in streaming.gathers:
        waits_ns[gather.launch] += gather_ns(gather, link)
    launch_ns = [sum(both) for both in zip(demand.launch_ns, waits_ns, strict=True)]
    copy_ns = [transfer_ns(piece.size_bytes, link) for piece in streaming.pieces]
    found = simulate_steps(streaming.lanes, launch_ns, copy_ns)
    begins_ns = zip(found.launch_begin_ns, waits_ns, strict=True)
    # Those that are copied ahead come first, as in `Streaming.transfers`.
    n_behind = len(found.copy_end_ns) - n_copied_ahead(streaming.lanes)
    return StreamingPass(
        period_ns=found.period_ns,
        launch_begin_ns=tuple(sum(both) for both in begins_ns),
        launch_end_ns=found.launch_end_ns,
        transfer_begin_ns=(*found.copy_begin_ns[n_behind:], *found.copy_begin_ns[:n_behind]),
        transfer_end_ns=(*found.copy_end_ns[n_behind:], *found.copy_end_ns[:n_behind]),
    )


def simulate_transfers(
    launch_ns: Sequence[float],
    transfers: Sequence[Transfer],
    sizes_bytes: Sequence[int],
    link: Link,
) -> StreamingPass:
    """As `simulate_steps`, by a recurrence of two lanes that is quick enough for a search.

    Raises:
        PlanError: a transfer waits for a launch that waits for it, or names one that there is not.
    """
    fields = [
        (
            transfer_ns(size_bytes, link),
            one.first_launch,
            one.after_pass * len(launch_ns) + one.after_launch,
        )
        for one, size_bytes in zip(transfers, sizes_bytes, strict=True)
    ]
    period_ns, *times = _planner.simulate_streaming(launch_ns, fields)
    launch_begin, launch_end, transfer_begin, transfer_end = (tuple(one) for one in times)
    return StreamingPass(period_ns, launch_begin, launch_end, transfer_begin, transfer_end)


def transfer_ns(size_bytes: int, link: Link) -> float:
    """What one copy of so many bytes takes."""
    return link.overhead_ns + size_bytes / link.bytes_per_second * 1e9


def gather_ns(gather: Gather, link: Link) -> float:
    """What a launch takes to gather rows, each one as a copy of its own."""
    if link.row_overhead_ns is not None:
        link = dataclasses.replace(link, overhead_ns=link.row_overhead_ns)
    return gather.n_rows * transfer_ns(gather.row_bytes, link)
