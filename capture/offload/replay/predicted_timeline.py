"""Predicted spans beside the measured ones of a timeline."""

from __future__ import annotations

import dataclasses

from offload.costs import STAGES, CostModel, HeaderShape
from offload.program import Program
from offload.timeline import HOST_LANE, ExecutionTimeline, Span, SpanKind


def with_prediction(
    execution: ExecutionTimeline,
    program: Program,
    shape: HeaderShape,
    costs: CostModel,
    device_lane: str,
) -> ExecutionTimeline:
    """An execution with the spans that `costs` predict of it.

    Raises:
        CostModelError: a launch of the program was never measured on this machine.
    """
    prediction = costs.predict(program, shape, execution.scheduling)
    origin_ns = execution.begin_ns
    spans, at_ns = [], 0.0

    def add(kind: SpanKind, name: str, lane: str, span: tuple[float, float], launch: int) -> None:
        begin_ns, end_ns = (origin_ns + round(moment) for moment in span)
        spans.append(Span(kind, name, lane, begin_ns, end_ns, launch))

    for stage in STAGES:
        duration_ns = prediction.stages_ns[stage]
        add(SpanKind.STAGE, stage, HOST_LANE, (at_ns, at_ns + duration_ns), -1)
        at_ns += duration_ns
    for launch, span in zip(program.launches, prediction.launches, strict=True):
        add(SpanKind.LAUNCH, launch.operator, device_lane, span, launch.index)
    for launch, span in zip(program.launches, prediction.issues, strict=False):
        add(SpanKind.ISSUE, launch.operator, HOST_LANE, span, launch.index)
    ordered = tuple(sorted(spans, key=lambda span: span.begin_ns))
    return dataclasses.replace(execution, predicted=ordered)
