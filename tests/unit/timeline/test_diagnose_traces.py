"""Idle time of devices in traces: the rule, its verdicts, and timelines of executions."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kineto_traces import Trace, parts_us, three_gaps

from offload.errors import DiagnosisError
from offload.observe.diagnosis import (
    Confidence,
    DeviceWork,
    Verdict,
    diagnose_timeline,
    diagnose_trace,
    split_idle,
)
from offload.observe.diagnosis.kineto import read_kineto
from offload.timeline import HOST_LANE, ExecutionTimeline, Span, SpanKind, Timeline


def test_each_kind_of_gap(tmp_path: Path) -> None:
    idle = split_idle(read_kineto(three_gaps().save(tmp_path / "t.json")).work)
    assert parts_us(idle.whole) == {"busy": 80, "host_wait": 40, "kernel_wait": 10, "other": 100}
    assert idle.whole.span_ns == 230_000
    assert [lane.lane for lane in idle.lanes] == ["stream 7"]


def work(begin: int, end: int, issued: int | None, lane: str = "a") -> DeviceWork:
    return DeviceWork(lane, begin, end, issued)


def test_the_limits_of_the_rule() -> None:
    """A launch begun exactly when the lane became idle is no host wait; the limit is excluded."""
    assert split_idle([work(0, 10, 0), work(20, 30, 10)], 11).whole.kernel_wait_ns == 10
    assert split_idle([work(0, 10, 0), work(20, 30, 10)], 10).whole.other_ns == 10
    assert split_idle([work(0, 10, 0), work(20, 30, 11)], 11).whole.host_wait_ns == 10


def test_work_without_a_launch_record_is_never_host_wait() -> None:
    idle = split_idle([work(0, 10, None), work(20, 30, None), work(100, 110, None)], 15).whole
    assert (idle.n_unlinked, idle.host_wait_ns) == (3, 0)
    assert (idle.kernel_wait_ns, idle.other_ns) == (10, 70)


def test_overlapping_work_on_one_lane_is_not_idle() -> None:
    """The long kernel is busy until 100, though a short one began and ended within it."""
    idle = split_idle([work(0, 100, 0), work(10, 20, 5), work(110, 120, 90)]).whole
    assert (idle.busy_ns, idle.kernel_wait_ns, idle.host_wait_ns) == (110, 10, 0)


def test_lanes_fill_each_others_gaps() -> None:
    idle = split_idle(
        [work(0, 10, 0), work(50, 60, 40), work(5, 45, 0, "b"), work(60, 70, 0, "b")], 1
    )
    assert idle.whole.host_wait_ns == 0
    assert idle.whole.other_ns == 5
    assert [(lane.lane, lane.host_wait_ns, lane.other_ns) for lane in idle.lanes] == [
        ("a", 40, 0),
        ("b", 0, 15),
    ]


def test_no_work_at_all() -> None:
    idle = split_idle([])
    assert idle.lanes == ()
    assert (idle.whole.n_work, idle.whole.span_ns) == (0, 0)


def test_the_parts_make_up_the_span() -> None:
    rng = random.Random(0)
    for _ in range(50):
        begins = [rng.randrange(1000) for _ in range(20)]
        works = [
            work(one, one + rng.randrange(60), rng.choice([None, one - rng.randrange(80)]))
            for one in begins
        ]
        whole = split_idle(works, 20).whole
        covered = set().union(*(range(one.begin_ns, one.end_ns) for one in works))
        assert whole.busy_ns == len(covered)
        idle_ns = whole.host_wait_ns + whole.kernel_wait_ns + whole.other_ns
        assert whole.span_ns == whole.busy_ns + idle_ns


def regular(n: int, *, kernel_us: float, launch_every_us: float) -> Trace:
    """A host that launches at a fixed rate, and a device that runs kernels as soon as it can."""
    trace, free = Trace(), 0.0
    for index in range(n):
        launched = index * launch_every_us
        begin = max(free, launched + 3)
        trace.kernel(begin, kernel_us, launched=launched)
        free = begin + kernel_us
    return trace


@pytest.mark.parametrize(
    ("kernel_us", "launch_every_us", "verdict"),
    [
        (1, 10, Verdict.HOST_BOUND),
        (6, 10, Verdict.BALANCED),
        (100, 10, Verdict.DEVICE_BOUND),
    ],
)
def test_verdict_of_a_trace(
    tmp_path: Path, kernel_us: float, launch_every_us: float, verdict: Verdict
) -> None:
    trace = regular(50, kernel_us=kernel_us, launch_every_us=launch_every_us)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.verdict is verdict
    assert found.confidence is Confidence.MEDIUM
    assert "profiler" in found.reasons[0]
    assert found.timings == ()
    assert {one.test for one in found.not_applied} == {"enqueue", "replay"}
    assert found.trace is not None
    assert found.trace.idle.whole.n_work == 50
    assert found.trace.mean_launch_ns == 2000
    assert found.trace.n_short == (50 if kernel_us < 2 else 0)
    assert "under the profiler" in str(found.gain)


def test_a_trace_without_launch_records_says_little(tmp_path: Path) -> None:
    trace = Trace()
    for index in range(10):
        trace.kernel(index * 100, 10, launched=None)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.confidence is Confidence.LOW
    assert "10 of 10 pieces of device work have no launch record" in found.reasons[0]


def test_a_device_that_waits_for_something_else(tmp_path: Path) -> None:
    trace = Trace()
    for index in range(10):
        trace.kernel(index * 100, 10, launched=index)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.confidence is Confidence.LOW
    assert "waited 89% of its span for something else" in found.reasons[0]


def test_one_piece_of_work_decides_nothing(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(10, 5, launched=1)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.verdict is Verdict.UNDECIDED
    assert [one.test for one in found.not_applied] == ["enqueue", "replay", "idle"]


def timeline_of(*executions: list[Span]) -> Timeline:
    timeline = Timeline("null", "test", {})
    timeline.executions = tuple(
        ExecutionTimeline(number, "host", tuple(spans), (), "none", 0, 0, 0)
        for number, spans in enumerate(executions, 1)
    )
    return timeline


def test_host_scheduling_is_host_bound_by_its_issue_spans() -> None:
    spans = []
    for launch in range(10):
        at = launch * 1000
        spans.append(Span(SpanKind.ISSUE, "aten::relu", HOST_LANE, at, at + 900, launch))
        spans.append(Span(SpanKind.LAUNCH, "aten::relu", "null device", at + 900, at + 990, launch))
    found = diagnose_timeline(timeline_of(spans))
    assert found.verdict is Verdict.HOST_BOUND
    assert found.confidence is Confidence.HIGH
    assert found.trace is not None
    assert (found.trace.idle.whole.n_unlinked, found.trace.n_short) == (0, 10)


def test_offloaded_executions_wait_for_their_one_submission() -> None:
    def execution(begin: int) -> list[Span]:
        return [
            Span(SpanKind.STAGE, "convert", HOST_LANE, begin, begin + 10),
            Span(SpanKind.STAGE, "submit", HOST_LANE, begin + 10, begin + 20),
            Span(SpanKind.LAUNCH, "aten::mm", "null device", begin + 20, begin + 120, 0),
            Span(SpanKind.LAUNCH, "aten::relu", "null device", begin + 125, begin + 220, 1),
        ]

    found = diagnose_timeline(timeline_of(execution(0), execution(220)))
    assert found.trace is not None
    whole = found.trace.idle.whole
    assert (whole.host_wait_ns, whole.kernel_wait_ns, whole.other_ns) == (20, 10, 0)
    assert found.verdict is Verdict.DEVICE_BOUND


def test_an_empty_timeline() -> None:
    with pytest.raises(DiagnosisError, match="none of the timeline's 0 executions"):
        diagnose_timeline(timeline_of())
