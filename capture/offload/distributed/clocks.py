"""Offsets between the clocks of ranks, from round trips of messages.

The first rank of a group asks every other rank for its time. Between the question and the answer
its clock goes from `t0` to `t1`, so the other clock showed its answer `c` at some moment in
between: the error of the offset `c - (t0 + t1) / 2` is at most `(t1 - t0) / 2`. The shortest of
many round trips is taken (F. Cristian, "Probabilistic clock synchronization", Distributed Computing
3, 1989).

The bound grows with the time between a moment and the round trip, as clocks drift: Linux slews
`CLOCK_MONOTONIC` by at most 500 ppm (`MAXFREQ` in include/linux/timex.h), two clocks by 1000 ppm
from one another. Processes of one boot of one machine read the same clock, so there is no drift.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload.errors import ExecutionError

N_ROUND_TRIPS = 64

DRIFT_PPM = 1000.0
"""The greatest drift between two clocks of different machines."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Clock = Callable[[], int]


@dataclasses.dataclass(frozen=True, slots=True)
class ClockOffset:
    """The offset of a rank's clock from that of the group's first rank.

    Attributes:
        rank: the rank in the world.
        offset_ns: the rank's clock minus the first rank's.
        error_ns: the greatest error of the offset at `measured_ns`.
        measured_ns: the time of the measurement, by the first rank's clock.
        is_same_clock: both are processes of one boot of one machine, so the clocks do not drift.
    """

    rank: int
    offset_ns: float
    error_ns: float
    measured_ns: int
    is_same_clock: bool

    def error_at_ns(self, moment_ns: float) -> float:
        """The greatest error of the offset at another moment of the first rank's clock."""
        if self.is_same_clock:
            return self.error_ns
        return self.error_ns + abs(moment_ns - self.measured_ns) * DRIFT_PPM / 1e6


def monotonic_ns() -> int:
    """The clock of timelines (std::chrono::steady_clock, CLOCK_MONOTONIC)."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def clock_offsets(
    group: Any = None, *, clock: Clock = monotonic_ns, n_round_trips: int = N_ROUND_TRIPS
) -> tuple[ClockOffset, ...]:
    """Estimate the clock offsets of a group's ranks; all of them call it together.

    Args:
        group: a process group on the CPU; None: the default group.
        clock: this rank's clock, in ns.
        n_round_trips: round trips with each rank, at least 1.

    Returns:
        On the group's first rank, an offset for each rank, in the order of the group; on other
        ranks an empty tuple.

    Raises:
        ExecutionError: a rank ended, or did not arrive within the group's timeout.
    """
    if n_round_trips < 1:
        raise ValueError(f"expected at least one round trip, got {n_round_trips}")
    import torch.distributed as dist  # noqa: PLC0415  (a process with a group has imported it)

    try:
        return _round_trips(dist, group, clock, n_round_trips)
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(
            "clocks of ranks: the process group failed, as when a rank ends or is too late: "
            f"{error}"
        ) from error


def _round_trips(
    dist: Any, group: Any, clock: Clock, n_round_trips: int
) -> tuple[ClockOffset, ...]:
    import torch  # noqa: PLC0415

    ranks: Sequence[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
    boots: list[Any] = [None] * len(ranks)
    dist.all_gather_object(boots, _boot(), group=group)
    message = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() != ranks[0]:
        for _ in range(n_round_trips):
            dist.recv(message, ranks[0], group=group)
            message[0] = clock()
            dist.send(message, ranks[0], group=group)
        return ()
    offsets = [ClockOffset(ranks[0], 0.0, 0.0, clock(), is_same_clock=True)]
    for rank, boot in zip(ranks[1:], boots[1:], strict=True):
        found = []
        for _ in range(n_round_trips):
            begin_ns = clock()
            dist.send(message, rank, group=group)
            dist.recv(message, rank, group=group)
            end_ns = clock()
            middle_ns = (begin_ns + end_ns) / 2
            # Half a round trip, and the nanosecond to which clocks are rounded.
            error_ns = (end_ns - begin_ns) / 2 + 1
            found.append((error_ns, int(message[0]) - middle_ns, end_ns))
        error_ns, offset_ns, measured_ns = min(found)
        is_same = bool(boot) and boot == boots[0]
        offsets.append(ClockOffset(rank, offset_ns, error_ns, measured_ns, is_same))
    return tuple(offsets)


def _boot() -> str:
    """An identity of the machine, its boot, and its clock namespace; empty: unknown."""
    try:
        namespace = Path("/proc/self/ns/time").readlink()
        return f"{_BOOT_ID.read_text().strip()} {namespace}"
    except OSError:
        return ""
