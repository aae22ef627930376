"""Diagnoses recordings: Kineto trace files, and timelines."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from offload.errors import DiagnosisError
from offload.observe.diagnosis.diagnosis import (
    Diagnosis,
    Gain,
    GainBound,
    TraceFigures,
    UnknownGain,
)
from offload.observe.diagnosis.evidence import NotApplied, conclude, idle_test
from offload.observe.diagnosis.idle import (
    KERNEL_GAP_NS,
    DeviceWork,
    LaneIdle,
    split_idle,
    work_of_executions,
)
from offload.observe.diagnosis.kineto import ProfiledOperator, read_kineto
from offload.timeline import Timeline


def diagnose_trace(
    path: str | os.PathLike[str], *, kernel_gap_ns: int = KERNEL_GAP_NS
) -> Diagnosis:
    """Diagnose a trace file that torch.profiler wrote (`export_chrome_trace`), gzip or not.

    Its times are those of a profiled run, not the model's: the profiler slows the host. Only the
    shares of idle time are used, and the confidence is reduced.

    Args:
        path: the file.
        kernel_gap_ns: shorter gaps between kernels are the device's; see `split_idle`.

    Raises:
        FileError: the file cannot be read, is not such a trace, or has no work of a device.
    """
    trace = read_kineto(path)
    reason = "it is a recorded trace, not a model to call"
    return _diagnose_work(
        trace.work,
        subject=os.fspath(path),
        device="of the trace",
        operators=trace.operators,
        reason=reason,
        kernel_gap_ns=kernel_gap_ns,
        profiled=True,
    )


def diagnose_timeline(timeline: Timeline, *, kernel_gap_ns: int = KERNEL_GAP_NS) -> Diagnosis:
    """Diagnose the executions of a timeline by the idle time of its device lanes.

    With host scheduling it shows whether the host keeps the device busy. With offload scheduling,
    waiting for the host is the time between executions.

    Raises:
        DiagnosisError: it has no launch or transfer on a device.
    """
    work = work_of_executions(timeline.executions)
    if not work:
        raise DiagnosisError(
            f"none of the timeline's {len(timeline.executions)} executions has a launch or "
            "transfer on a device: execute inside its with-block, and diagnose after it"
        )
    subject = f"timeline of {len(timeline.executions)} executions"
    reason = "it is a recorded timeline, not a model to call"
    return _diagnose_work(
        work,
        subject=subject,
        device=timeline.device,
        operators=(),
        reason=reason,
        kernel_gap_ns=kernel_gap_ns,
        profiled=False,
    )


def _diagnose_work(
    work: Sequence[DeviceWork],
    *,
    subject: str,
    device: str,
    operators: tuple[ProfiledOperator, ...],
    reason: str,
    kernel_gap_ns: int,
    profiled: bool,
) -> Diagnosis:
    idle = split_idle(work, kernel_gap_ns)
    findings, not_applied = [], [NotApplied("enqueue", reason), NotApplied("replay", reason)]
    if idle.whole.n_work > 1 and idle.whole.span_ns > 0:
        findings.append(idle_test(idle, profiled=profiled))
    else:
        not_applied.append(NotApplied("idle", "there is no time between two pieces of device work"))
    conclusion = conclude(findings)
    calls_ns = [one.issue_ns for one in work if one.issue_ns is not None]
    figures = TraceFigures(
        idle=idle,
        mean_launch_ns=statistics.mean(calls_ns) if calls_ns else None,
        n_short=sum(
            one.issue_ns is not None and one.end_ns - one.begin_ns < one.issue_ns for one in work
        ),
        operators=operators,
    )
    return Diagnosis(
        subject=subject,
        device=device,
        verdict=conclusion.verdict,
        confidence=conclusion.confidence,
        reasons=conclusion.reasons,
        findings=tuple(findings),
        not_applied=tuple(not_applied),
        timings=(),
        n_launches=None,
        gain=_gain_bound(idle.whole) if profiled else UnknownGain(reason),
        trace=figures,
    )


def _gain_bound(whole: LaneIdle) -> Gain:
    if whole.span_ns == whole.host_wait_ns:
        return UnknownGain("the device's work takes no time in this trace")
    return GainBound(whole.span_ns / (whole.span_ns - whole.host_wait_ns))
