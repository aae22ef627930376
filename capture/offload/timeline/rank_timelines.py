"""Timelines of several ranks on one axis: gathered through their process group, clocks aligned."""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

from offload.distributed.clocks import Clock, ClockOffset, clock_offsets, monotonic_ns
from offload.errors import ExecutionError, TimelineError
from offload.timeline.timeline import Timeline


@dataclasses.dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one rank recorded.

    Attributes:
        rank: in the world.
        timeline: its executions, which may be none, in ns of its own clock.
        offset: of its clock from that of the first rank.
    """

    rank: int
    timeline: Timeline
    offset: ClockOffset

    @property
    def origin_ns(self) -> float:
        """The moment that its spans count from, by the first rank's clock."""
        return self.timeline.origin_ns - self.offset.offset_ns

    @property
    def error_ns(self) -> float:
        """How far its spans may lie from where they belong among those of the first rank."""
        executions = self.timeline.executions
        if not executions:
            return self.offset.error_ns
        moments = [self.origin_ns, *(self.origin_ns + one.end_ns for one in executions)]
        return max(self.offset.error_at_ns(one) for one in moments)


@dataclasses.dataclass(frozen=True, slots=True)
class RankTimelines:
    """The timelines of all ranks of a group, by rank in the order of the group.

    Attributes:
        ranks: of which the first has the clock that all are aligned to.
        world_size: how many ranks the world has.
    """

    ranks: tuple[RankTimeline, ...]
    world_size: int

    @property
    def error_ns(self) -> float:
        """How far spans of one rank may lie from where they belong among those of the first."""
        return max(one.error_ns for one in self.ranks)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one Chrome trace with a process for each rank, for Perfetto and chrome://tracing.

        The object `clockAlignment` in it has for each rank the offset of its clock and by how much
        its events may be off.

        Args:
            path: ends in `.json`, or in `.json.gz` to be compressed.

        Raises:
            TimelineError: the path ends otherwise, or no rank has executions.
        """
        if not any(one.timeline.executions for one in self.ranks):
            raise TimelineError(
                "the timelines of all ranks are empty: execute inside the with-block of timeline()"
            )
        importlib.import_module("offload.observe.timelines.rank_trace").save_rank_trace(self, path)


def gather_timelines(
    timeline: Timeline, group: Any = None, *, clock: Clock = monotonic_ns
) -> RankTimelines | None:
    """Gather the timelines of a group's ranks; all ranks call it at once, behind their blocks.

    Args:
        timeline: of this rank.
        group: of `torch.distributed`, on the CPU; None: the default one.
        clock: in ns, of this rank's timelines.

    Returns:
        All timelines on the group's first rank; None on the others.

    Raises:
        ExecutionError: torch.distributed is not initialised, this rank is not in the group, a rank
            ended, or did not come within the group's timeout.
    """
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available() or not dist.is_initialized():
        raise ExecutionError(
            "timelines of ranks are gathered through a process group, and torch.distributed is not "
            "initialised: call init_process_group, or save() the timeline of this process alone"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ExecutionError(
            f"timelines of ranks: rank {dist.get_rank()} is not in the given group: call it on the "
            "group's ranks alone"
        )
    offsets = clock_offsets(group, clock=clock)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    is_first = dist.get_rank() == ranks[0]
    found: list[Any] | None = [None] * len(ranks) if is_first else None
    try:
        dist.gather_object(timeline, found, dst=ranks[0], group=group)
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(
            "timelines of ranks: the process group failed, as when a rank ends or is too late: "
            f"{error}"
        ) from error
    if found is None:
        return None
    rows = zip(ranks, found, offsets, strict=True)
    return RankTimelines(
        tuple(RankTimeline(rank, one, offset) for rank, one, offset in rows),
        dist.get_world_size(),
    )
