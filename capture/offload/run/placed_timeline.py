"""Timelines of executions on several devices: launches where they run, and transfers between."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from offload.errors import TimelineError
from offload.run.placed_queue import PlacedQueue, PlacedSegment
from offload.run.transfers import CopySpan
from offload.timeline import ExecutionTimeline, Span, SpanKind, Timeline

_POLICIES = ("none", "io", "all")


@contextlib.contextmanager
def placed_timeline(
    segments: Sequence[PlacedSegment], names: Sequence[str], queue: PlacedQueue
) -> Iterator[Timeline]:
    """Record the executions inside a with-block, submitted by one thread.

    Args:
        segments: segments that stay on their devices.
        names: of the devices, for lanes.
        queue: makes the transfers.

    Yields:
        A Timeline, filled when the block ends: launches have a lane for each device, transfers one
        for each direction between two memories.

    Raises:
        TimelineError: segments differ in the number of their executions, as where one failed or was
            in flight at the beginning or the end.
        ExecutionError: another timeline is being recorded.
    """
    runs = [one.run(one.costs.planned) for one in segments]
    machine = runs[0].machine
    whole = Timeline(runs[0].device, machine.name, {"torch": torch.__version__})
    first = queue.n_queued
    with contextlib.ExitStack() as recorded, queue.links.recording() as copies:
        parts = [recorded.enter_context(run.timeline()) for run in runs]
        yield whole
    counts = {len(one.executions) for one in parts}
    if len(counts) != 1:
        raise TimelineError(
            f"segments have ended {min(counts):,} to {max(counts):,} times inside the with-block "
            "of timeline(): wait for running executions before and in the block, and record calls "
            "that succeed"
        )
    begins_ns = [one.origin_ns for one in parts if one.executions]
    whole.origin_ns = min([*begins_ns, *(one.begin_ns for one in copies)], default=0)
    lanes = [names[one.costs.planned] for one in segments]
    whole.executions = tuple(
        _joined(
            [
                _placed(part.executions[at], part.origin_ns - whole.origin_ns, segment, lane)
                for part, segment, lane in zip(parts, segments, lanes, strict=True)
            ],
            [one for one in copies if one.number == first + at + 1],
            whole.origin_ns,
        )
        for at in range(counts.pop())
    )
    whole.clock_reads = sum(one.clock_reads for one in parts) + 2 * len(copies)
    whole.clock_read_ns = max(one.clock_read_ns for one in parts)


def _placed(
    one: ExecutionTimeline, shift_ns: int, segment: PlacedSegment, lane: str
) -> ExecutionTimeline:
    """Return a segment's execution on its device's lane, with launches numbered as in the whole."""
    device, launches = segment.run(segment.costs.planned).device, segment.slice.launches

    def span(found: Span) -> Span:
        on = found.lane.replace(device, lane, 1) if found.lane.startswith(device) else found.lane
        at = launches[found.launch] if found.launch >= 0 and launches else found.launch
        return dataclasses.replace(found.later(shift_ns), lane=on, launch=at)

    return dataclasses.replace(one, spans=tuple(map(span, one.spans)))


def _joined(
    parts: Sequence[ExecutionTimeline], copies: Sequence[CopySpan], origin_ns: int
) -> ExecutionTimeline:
    transfers = [
        Span(
            SpanKind.TRANSFER,
            one.what,
            one.link,
            one.begin_ns - origin_ns,
            one.end_ns - origin_ns,
            size_bytes=one.size_bytes,
        )
        for one in copies
    ]
    spans = [*(span for one in parts for span in one.spans), *transfers]
    return dataclasses.replace(
        parts[0],
        spans=tuple(sorted(spans, key=lambda one: one.begin_ns)),
        policy=max((one.policy for one in parts), key=_POLICIES.index),
        slots_changed=sum(one.slots_changed for one in parts),
        words_patched=sum(one.words_patched for one in parts),
        bytes_copied=sum(one.bytes_copied for one in parts),
        outputs_allocated=sum(one.outputs_allocated for one in parts),
        bytes_streamed=sum(one.bytes_streamed for one in parts),
        times_weights=all(one.times_weights for one in parts),
        pass_ns=None,
    )
