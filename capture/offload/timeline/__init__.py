"""Timelines: what executions did and when, as data. `observe.timelines` draws them."""

from offload.timeline.spans import (
    COLLECTIVES_LANE,
    HOST_LANE,
    WEIGHT_WAIT,
    WEIGHTS_LANE,
    ExecutionTimeline,
    Scheduling,
    Span,
    SpanKind,
)
from offload.timeline.timeline import Timeline

__all__ = [
    "COLLECTIVES_LANE",
    "HOST_LANE",
    "WEIGHTS_LANE",
    "WEIGHT_WAIT",
    "ExecutionTimeline",
    "Scheduling",
    "Span",
    "SpanKind",
    "Timeline",
]
