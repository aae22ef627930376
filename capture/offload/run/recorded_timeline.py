"""Timelines from the native record of each execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from offload.native import _native
from offload.plan.collective_lanes import exchanged_spans, started_collectives
from offload.program import Program
from offload.run.reports import substages_of
from offload.timeline import (
    COLLECTIVES_LANE,
    HOST_LANE,
    WEIGHT_WAIT,
    WEIGHTS_LANE,
    ExecutionTimeline,
    Scheduling,
    Span,
    SpanKind,
    Timeline,
)

COPY_LANE = "copies"


def lane_name(device_lane: str, lane: int) -> str:
    """Return the name of the timeline lane of a lane of launches."""
    return f"{device_lane} lane {lane}" if lane else device_lane


def fill_timeline(
    timeline: Timeline,
    traces: Sequence[_native.ExecutionTrace],
    program: Program,
    *,
    device_lane: str,
    scheduling: Scheduling,
    substages: Sequence[str] = (),
    launch_lanes: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Put recorded executions into a timeline, whose origin is the begin of the first call.

    `substages`: the device's names of the substages of submit. `launch_lanes`: by launch, where
    there are several; the thread that ran a lane is not recorded.
    """
    timeline.origin_ns = min((trace.execution.call_ns for trace in traces), default=0)
    timeline.executions = tuple(
        _execution(
            trace,
            program,
            device_lane=device_lane,
            scheduling=scheduling,
            origin_ns=timeline.origin_ns,
            substages=substages,
            launch_lanes=launch_lanes,
        )
        for trace in traces
    )


def _execution(
    trace: _native.ExecutionTrace,
    program: Program,
    *,
    device_lane: str,
    scheduling: Scheduling,
    origin_ns: int,
    substages: Sequence[str],
    launch_lanes: Mapping[int, int],
) -> ExecutionTimeline:
    """Return one execution's spans, in ns since `origin_ns` of the native clock."""
    spans = [
        *_stages(trace.execution),
        *(
            Span(SpanKind.SUBSTAGE, name, HOST_LANE, begin_ns, end_ns)
            for name, begin_ns, end_ns in substages_of(trace.execution, substages)
        ),
        *_transfers(trace),
        *_launches(trace.launches, SpanKind.LAUNCH, device_lane, program, launch_lanes),
        *_weights(trace, device_lane),
        *_collectives(trace.launches, program),
    ]
    if scheduling is Scheduling.HOST:
        spans += _launches(trace.issues, SpanKind.ISSUE, HOST_LANE, program)
    return ExecutionTimeline(
        number=trace.execution.n_executions,
        scheduling=scheduling,
        spans=tuple(sorted((span.later(-origin_ns) for span in spans), key=_by_begin)),
        predicted=(),
        policy=trace.execution.policy,
        slots_changed=trace.execution.slots_changed,
        words_patched=trace.execution.words_patched,
        bytes_copied=trace.execution.bytes_copied,
        outputs_allocated=trace.execution.outputs_allocated,
        bytes_streamed=trace.execution.bytes_streamed,
        times_weights=trace.execution.stream_wait_ns is not None,
        pass_ns=trace.execution.pass_ns,
    )


def _stages(one: _native.LastExecution) -> Iterator[Span]:
    """Yield the header; convert has two parts, on the caller's thread and where the execution runs.

    Each part is split where torch's queue was drained meanwhile.
    """
    for name, begin_ns, end_ns in (
        *_converting(one.call_ns, one.checked_ns, one.drain),
        *_converting(one.begin_ns, one.bound_ns, one.drain_of_copies),
        ("policy", one.bound_ns, one.decided_ns),
        ("patch", one.decided_ns, one.patched_ns),
        ("submit", one.patched_ns, one.submitted_ns),
    ):
        yield Span(SpanKind.STAGE, name, HOST_LANE, begin_ns, end_ns)


def _converting(begin_ns: int, end_ns: int, drain: _native.Drain) -> Iterator[tuple[str, int, int]]:
    if drain.end_ns:
        yield "convert", begin_ns, drain.begin_ns
        yield "drain", drain.begin_ns, drain.end_ns
        begin_ns = drain.end_ns
    yield "convert", begin_ns, end_ns


def _transfers(trace: _native.ExecutionTrace) -> Iterator[Span]:
    for one in trace.transfers:
        name = "copy in" if one.inbound else "copy out"
        yield Span(
            SpanKind.TRANSFER,
            name,
            COPY_LANE,
            one.begin_ns,
            one.end_ns,
            size_bytes=one.size_bytes,
        )


def _weights(trace: _native.ExecutionTrace, device_lane: str) -> Iterator[Span]:
    """Yield transfers of weights, and on the device's lane the launches that wait for them."""
    for one in trace.weight_transfers:
        yield Span(
            SpanKind.WEIGHTS,
            one.weight,
            WEIGHTS_LANE,
            one.begin_ns,
            one.end_ns,
            size_bytes=one.size_bytes,
        )
    for wait in trace.weight_waits:
        yield Span(
            SpanKind.WAIT,
            WEIGHT_WAIT,
            device_lane,
            wait.begin_ns,
            wait.end_ns,
            wait.launch,
        )


def _collectives(times: _native.LaunchTimes, program: Program) -> Iterator[Span]:
    """Yield collectives, from the launches that start and await them."""
    if not program.groups or not times.begin_ns:
        return
    spans = exchanged_spans(program, times.begin_ns, times.end_ns)
    yield from collective_spans(program, spans)


def collective_spans(program: Program, spans: Mapping[int, tuple[int, int]]) -> Iterator[Span]:
    """Yield spans of collectives, each on the lane of its group.

    Args:
        program: the program of the launches.
        spans: when a collective begins and ends, in ns, by the launch that starts it.
    """
    for one in started_collectives(program):
        launch = program.launches[one.start]
        lane = COLLECTIVES_LANE if len(program.groups) == 1 else f"{COLLECTIVES_LANE} {one.group}"
        begin_ns, end_ns = spans[one.start]
        yield Span(
            SpanKind.COLLECTIVE,
            launch.name,
            lane,
            begin_ns,
            end_ns,
            launch.index,
            place=launch.place,
        )


def _launches(
    times: _native.LaunchTimes,
    kind: SpanKind,
    lane: str,
    program: Program,
    lanes: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[Span]:
    rows = zip(program.launches, times.begin_ns, times.end_ns, strict=True)
    for launch, begin_ns, end_ns in rows:
        on = lane_name(lane, lanes.get(launch.index, 0))
        yield Span(kind, launch.name, on, begin_ns, end_ns, launch.index, place=launch.place)


def _by_begin(span: Span) -> int:
    return span.begin_ns
