"""Timelines of ranks as one Chrome trace: a process for each rank, on the first rank's clock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from offload.observe.timelines.trace import Event, process_names, trace_of, write_trace

if TYPE_CHECKING:
    from offload.timeline.rank_timelines import RankTimeline, RankTimelines

_SOURCE = 'round trips; F. Cristian, "Probabilistic clock synchronization", 1989'


def save_rank_trace(timelines: RankTimelines, path: str | os.PathLike[str]) -> None:
    """Write the trace.

    Raises:
        TimelineError: the path does not end in `.json` or `.json.gz`.
    """
    write_trace(rank_trace_of(timelines), path)


def rank_trace_of(timelines: RankTimelines) -> dict[str, Any]:
    """The trace as an object of JSON; times are microseconds from the first rank's begin on."""
    filled = [one for one in timelines.ranks if one.timeline.executions]
    origin_ns = min(one.origin_ns for one in filled)
    events: list[Event] = []
    versions: dict[str, str] = {}
    n_ids = 0
    for one in filled:
        trace = trace_of(one.timeline)
        versions |= trace["versions"]
        shift_us = (one.origin_ns - origin_ns) / 1e3
        moved = [_moved(event, one.rank, shift_us, n_ids) for event in trace["traceEvents"]]
        events += [*_named(one), *(event for event in moved if not _names_process(event))]
        n_ids += 1 + max(
            (event.get("id", event.get("args", {}).get("correlation", 0)) for event in moved),
            default=0,
        )
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "deviceProperties": [{"id": one.rank, "name": one.timeline.machine_name} for one in filled],
        "distributedInfo": {"rank": timelines.ranks[0].rank, "world_size": timelines.world_size},
        "versions": versions,
        "clockAlignment": {
            "method": _SOURCE,
            "reference_rank": timelines.ranks[0].rank,
            "ranks": [
                {
                    "rank": one.rank,
                    "offset_ns": one.offset.offset_ns,
                    "error_ns": one.error_ns,
                    "same_clock": one.offset.is_same_clock,
                }
                for one in timelines.ranks
            ],
        },
        "traceEvents": events,
    }


def _moved(event: Event, rank: int, shift_us: float, n_ids: int) -> Event:
    """The event in the process of its rank, on the first rank's clock."""
    moved = {**event, "pid": rank}
    if event["ph"] != "M":
        moved["ts"] = event["ts"] + shift_us
    elif event["name"] == "thread_name":
        name = f"{process_names(event['pid'])}: {event['args']['name']}"
        moved["args"] = {"name": name}
    if "id" in event:
        moved["id"] = event["id"] + n_ids
    if "correlation" in event.get("args", {}):
        moved["args"] = event["args"] | {"correlation": event["args"]["correlation"] + n_ids}
    return moved


def _names_process(event: Event) -> bool:
    return event["ph"] == "M" and str(event["name"]).startswith("process_")


def _named(one: RankTimeline) -> list[Event]:
    """The name of the rank's process, its place among the others, and how exact its times are."""
    exact = f"clock within {one.error_ns / 1e3:,.1f} us"
    arguments = {
        "process_name": {"name": f"rank {one.rank} ({one.timeline.device})"},
        "process_sort_index": {"sort_index": one.rank},
        "process_labels": {"labels": exact},
    }
    return [
        {"ph": "M", "name": name, "pid": one.rank, "tid": 0, "ts": 0.0, "args": given}
        for name, given in arguments.items()
    ]
