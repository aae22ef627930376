"""Predicted spans beside the measured ones of a timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from offload.costs import STAGES, CostModel, HeaderShape, signature_of
from offload.plan import simulate_streaming, weight_demand
from offload.plan.collective_lanes import (
    CollectiveTimes,
    collective_lanes,
    simulate_collectives,
)
from offload.plan.simulate_steps import simulate_steps
from offload.plan.steps import Lane, lanes_of_launches
from offload.plan.streaming import Streaming
from offload.program import Launch, Program
from offload.run.recorded_timeline import collective_spans, lane_name
from offload.timeline import (
    HOST_LANE,
    WEIGHT_WAIT,
    WEIGHTS_LANE,
    ExecutionTimeline,
    Span,
    SpanKind,
    Timeline,
)

if TYPE_CHECKING:
    from offload.run.executable import Executable


def predict(run: Executable, timeline: Timeline, costs: CostModel) -> None:
    """Add predicted spans to the executions of a timeline.

    Raises:
        CostModelError: a launch of the program was never measured on this machine.
    """
    unknown = {signature_of(launch) for launch in run.program.launches} - set(costs.launch_ns)
    if unknown:
        costs = _learned(run, timeline, costs).keeping(costs.launch_ns)
    timeline.executions = tuple(
        with_prediction(
            one,
            run.program,
            run.header_shape(one.outputs_allocated, one.slots_changed, one.words_patched),
            costs,
            run.device,
            streaming=run.plan.streaming,
            launch_lanes=run.plan.launch_lanes or (),
            collectives=None if run.overlap is None else run.overlap.times,
        )
        for one in timeline.executions
    )


def _learned(run: Executable, timeline: Timeline, costs: CostModel) -> CostModel:
    """Add the launches' measured durations; on a device that queues work, the plan's.

    `streaming.explain()` says whether the plan's durations were measured.
    """
    streaming = run.plan.streaming
    is_known = streaming is not None and streaming.launch_ns and not streaming.is_resident
    if streaming is not None and is_known and run.queues_work:
        return costs.timed(run.program, streaming.launch_ns)
    return costs.learned(run.program, timeline.executions)


def with_prediction(
    execution: ExecutionTimeline,
    program: Program,
    shape: HeaderShape,
    costs: CostModel,
    device_lane: str,
    *,
    streaming: Streaming | None = None,
    launch_lanes: Sequence[Lane] = (),
    collectives: CollectiveTimes | None = None,
) -> ExecutionTimeline:
    """Return an execution with the spans that `costs` predict.

    Where weights are streamed, and the program is delivered as one task, launches begin as
    `simulate_streaming` says, with their waits and the transfers meanwhile. Host scheduling is
    predicted as if all weights were resident. On lanes launches begin as `simulate_steps` says, and
    with `collectives`, the times that the load measured on all ranks, as `simulate_collectives`.

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
        if stage == "drain" and not round(duration_ns):  # the device has no queue to drain
            continue
        add(SpanKind.STAGE, stage, HOST_LANE, (at_ns, at_ns + duration_ns), -1)
        at_ns += duration_ns
    if streaming is not None and not streaming.is_resident and not prediction.issues:
        durations_ns = costs.durations_ns(program)
        spans += _streamed(program, streaming, durations_ns, origin_ns + round(at_ns), device_lane)
    elif collectives is not None and not prediction.issues:
        spans += _exchanging(program, collectives, origin_ns + round(at_ns), device_lane)
    elif len(launch_lanes) > 1:
        durations_ns = costs.durations_ns(program)
        for launch, lane, span in _on_lanes(program, launch_lanes, durations_ns, at_ns):
            add(SpanKind.LAUNCH, launch.name, lane_name(device_lane, lane), span, launch.index)
    else:
        for launch, span in zip(program.launches, prediction.launches, strict=True):
            add(SpanKind.LAUNCH, launch.name, device_lane, span, launch.index)
    for launch, span in zip(program.launches, prediction.issues, strict=False):
        add(SpanKind.ISSUE, launch.name, HOST_LANE, span, launch.index)
    return dataclasses.replace(execution, predicted=_ordered(spans))


def _on_lanes(
    program: Program, lanes: Sequence[Lane], durations_ns: Sequence[float], begin_ns: float
) -> Iterator[tuple[Launch, int, tuple[float, float]]]:
    """Yield launches, the lane of each, and when it begins and ends."""
    found = simulate_steps(lanes, durations_ns, ())
    lane_of = lanes_of_launches(lanes)
    for launch, begin, end in zip(
        program.launches, found.launch_begin_ns, found.launch_end_ns, strict=True
    ):
        yield launch, lane_of[launch.index], (begin_ns + begin, begin_ns + end)


def _exchanging(
    program: Program, times: CollectiveTimes, origin_ns: int, device_lane: str
) -> Iterator[Span]:
    """Yield spans of launches, and beside them of exchanges between ranks."""
    one = simulate_collectives(program, times)
    for launch, begin_ns, end_ns in zip(
        program.launches, one.launch_begin_ns, one.launch_end_ns, strict=True
    ):
        begin, end = (origin_ns + round(moment) for moment in (begin_ns, end_ns))
        yield Span(SpanKind.LAUNCH, launch.name, device_lane, begin, end, launch.index)
    starts = [step.piece for lane in collective_lanes(program)[1:] for step in lane.copies]
    spans = {
        start: (origin_ns + round(begin_ns), origin_ns + round(end_ns))
        for start, begin_ns, end_ns in zip(starts, one.copy_begin_ns, one.copy_end_ns, strict=True)
    }
    yield from collective_spans(program, spans)


def predicted_pass(
    execution: ExecutionTimeline, program: Program, streaming: Streaming, device_lane: str
) -> ExecutionTimeline:
    """Return an execution with only the launches and copies of its plan of streamed weights."""
    spans = _streamed(program, streaming, streaming.launch_ns, execution.begin_ns, device_lane)
    return dataclasses.replace(execution, predicted=_ordered(spans))


def _ordered(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: span.begin_ns))


def _streamed(
    program: Program,
    streaming: Streaming,
    launch_ns: Sequence[float],
    origin_ns: int,
    device_lane: str,
) -> Iterator[Span]:
    """Yield launches, their waits, and concurrent transfers, from the first launch's turn.

    Transfers for the next pass begin in this one; shifted by one pass, they are this pass's
    transfers that began before it.
    """
    demand = weight_demand(program, launch_ns)
    one = simulate_streaming(demand, streaming, streaming.link)
    for launch, begin_ns, end_ns, wait_ns in zip(
        program.launches, one.launch_begin_ns, one.launch_end_ns, one.wait_ns, strict=True
    ):
        begin, end = (origin_ns + round(moment) for moment in (begin_ns, end_ns))
        yield Span(SpanKind.LAUNCH, launch.name, device_lane, begin, end, launch.index)
        if wait := round(wait_ns):
            yield Span(SpanKind.WAIT, WEIGHT_WAIT, device_lane, begin - wait, begin, launch.index)
    times = zip(streaming.transfers, one.copy_begin_ns, one.copy_end_ns, strict=True)
    for transfer, begin_ns, end_ns in times:
        piece = streaming.pieces[transfer.piece]
        name = program.values[piece.value].name
        for shift_ns in (0.0, one.period_ns):
            from_ns = round(max(0.0, begin_ns + shift_ns))
            until_ns = round(min(end_ns + shift_ns, one.period_ns))
            if from_ns < until_ns:
                yield Span(
                    SpanKind.WEIGHTS,
                    name,
                    WEIGHTS_LANE,
                    origin_ns + from_ns,
                    origin_ns + until_ns,
                    size_bytes=piece.size_bytes,
                )
