"""Idle time of a device, split into waiting for the host, for the next kernel, and other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from offload.timeline import HOST_LANE, ExecutionTimeline, Span, SpanKind

KERNEL_GAP_NS = 30_000
"""Gaps shorter than this are the device's delay between two kernels.

Source: `consecutive_kernel_delay = 30` of Holistic Trace Analysis 0.6.1. Its documentation says
nanoseconds, but it compares with the trace's unit, which is microseconds. Its behaviour is followed
here, so that both split the same file in the same way.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel, copy or fill on a device.

    Attributes:
        lane: the stream that it ran on.
        begin_ns, end_ns: when it ran; end_ns >= begin_ns.
        issued_ns: when the host began the call that launched it; None if not recorded.
        issue_ns: the duration of that call; None likewise.
    """

    lane: str
    begin_ns: int
    end_ns: int
    issued_ns: int | None
    issue_ns: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LaneIdle:
    """The time of one lane, or a whole device, from its first work to its last.

    busy + host wait + kernel wait + other = span.

    Attributes:
        lane: the stream, or the device.
        n_work: pieces of work.
        n_unlinked: the number of these without a record of their launch.
        span_ns: from the first begin to the last end.
        busy_ns: at least one piece of work ran.
        host_wait_ns: idle, and the host had not yet begun to launch the next work.
        kernel_wait_ns: idle otherwise, for less than the threshold.
        other_ns: idle otherwise.
    """

    lane: str
    n_work: int
    n_unlinked: int
    span_ns: int
    busy_ns: int
    host_wait_ns: int
    kernel_wait_ns: int
    other_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceIdle:
    """A device's idle time.

    Attributes:
        whole: idle when no lane was busy.
        lanes: each lane, ordered by name.
    """

    whole: LaneIdle
    lanes: tuple[LaneIdle, ...]


def split_idle(work: Iterable[DeviceWork], kernel_gap_ns: int = KERNEL_GAP_NS) -> DeviceIdle:
    """Split the idle time before each piece of work by what the lane waited for.

    Host wait: the host began the launch after everything earlier had ended. Otherwise kernel wait,
    if the gap is shorter than `kernel_gap_ns`, else other. Work without a launch record is never
    host wait.

    Source: Holistic Trace Analysis 0.6.1, `BreakdownAnalysis._analyze_idle_time_for_stream`. It
    measures each gap from the piece that began before; here from the latest end so far. This
    differs where work overlaps on a lane: time in which anything runs is not idle.
    """
    in_order = sorted(work, key=lambda one: (one.begin_ns, one.end_ns))
    lanes: dict[str, list[DeviceWork]] = {}
    for one in in_order:
        lanes.setdefault(one.lane, []).append(one)
    return DeviceIdle(
        _split_lane("device", in_order, kernel_gap_ns),
        tuple(_split_lane(lane, lanes[lane], kernel_gap_ns) for lane in sorted(lanes)),
    )


def _split_lane(lane: str, in_order: Sequence[DeviceWork], kernel_gap_ns: int) -> LaneIdle:
    host_wait_ns = kernel_wait_ns = other_ns = 0
    begin_ns = end_ns = in_order[0].begin_ns if in_order else 0
    for one in in_order:
        gap_ns = one.begin_ns - end_ns
        if gap_ns > 0:
            if one.issued_ns is not None and one.issued_ns > end_ns:
                host_wait_ns += gap_ns
            elif gap_ns < kernel_gap_ns:
                kernel_wait_ns += gap_ns
            else:
                other_ns += gap_ns
        end_ns = max(end_ns, one.end_ns)
    span_ns = end_ns - begin_ns
    return LaneIdle(
        lane=lane,
        n_work=len(in_order),
        n_unlinked=sum(one.issued_ns is None for one in in_order),
        span_ns=span_ns,
        busy_ns=span_ns - host_wait_ns - kernel_wait_ns - other_ns,
        host_wait_ns=host_wait_ns,
        kernel_wait_ns=kernel_wait_ns,
        other_ns=other_ns,
    )


def work_of_executions(executions: Iterable[ExecutionTimeline]) -> tuple[DeviceWork, ...]:
    """The device's work in a timeline, as input of `split_idle`.

    With host scheduling the host's call for a launch is its issue span. With offload scheduling one
    call delivers all launches of an execution: the submit stage.
    """
    return tuple(work for execution in executions for work in _work_of(execution))


def _work_of(execution: ExecutionTimeline) -> Iterable[DeviceWork]:
    issues = {span.launch: span for span in execution.of_kind(SpanKind.ISSUE)}
    stages = execution.of_kind(SpanKind.STAGE)
    submit = next((span for span in stages if span.name == "submit"), None)
    for span in execution.spans:
        if span.lane != HOST_LANE and span.kind in (SpanKind.LAUNCH, SpanKind.TRANSFER):
            call: Span | None = issues.get(span.launch) if issues else submit
            yield DeviceWork(
                span.lane,
                span.begin_ns,
                span.end_ns,
                None if call is None else call.begin_ns,
                None if call is None else call.duration_ns,
            )
