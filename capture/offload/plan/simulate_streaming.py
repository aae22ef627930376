"""Simulates passes of weight streaming: one lane computes, one copies, both in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.native import _planner
from offload.plan.simulate_steps import SimulatedExecution, simulate_steps
from offload.plan.steps import Transfer
from offload.plan.streaming import Gather, Streaming, WeightDemand
from offload.plan.topology import Link


def simulate_streaming(
    demand: WeightDemand, streaming: Streaming, link: Link
) -> SimulatedExecution:
    """Run passes, the first from an empty ring, until two in a row take the same time.

    At least three and at most sixteen; the last one is returned, its copies in the order of
    `Streaming.transfers`. Launches that gather rows wait for them after everything else.

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
    return dataclasses.replace(found, launch_begin_ns=tuple(sum(both) for both in begins_ns))


def simulate_transfers(
    launch_ns: Sequence[float],
    transfers: Sequence[Transfer],
    sizes_bytes: Sequence[int],
    link: Link,
) -> SimulatedExecution:
    """As `simulate_steps`, by a recurrence over two lanes that is quick enough for a search.

    Raises:
        PlanError: a transfer waits for a launch that waits for it, or names a launch that does not
            exist.
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
    return SimulatedExecution(period_ns, *map(tuple, times))


def transfer_ns(size_bytes: int, link: Link) -> float:
    """The duration of one copy of `size_bytes`."""
    return link.overhead_ns + size_bytes / link.bytes_per_second * 1e9


def gather_ns(gather: Gather, link: Link) -> float:
    """The time of a launch to gather rows, each as a separate copy."""
    if link.row_overhead_ns is not None:
        link = dataclasses.replace(link, overhead_ns=link.row_overhead_ns)
    return gather.n_rows * transfer_ns(gather.row_bytes, link)
