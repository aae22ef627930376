"""Reports of streamed executions: explain, the report, the timeline, progress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from budgets import Deep, floor_of
from cost_models import NO_HEADER
from stored import save_weights, without_memory

import offload
from offload.api.captured import Captured
from offload.observe.report import report_on, report_table
from offload.observe.timelines.summary import launch_groups
from offload.timeline import SpanKind

KIB = 1024


@pytest.fixture
def deep(tmp_path: Path) -> Captured:
    save_weights(Deep().eval(), tmp_path)
    return offload.capture(without_memory(Deep), torch.randn(4, 128), weights=tmp_path)


def test_explain_says_what_the_last_execution_took(deep: Captured) -> None:
    with deep.load(weights_budget=floor_of(deep)) as run:
        assert "measured: nothing has been executed yet" in run.streaming.explain()
        run(torch.randn(4, 128))
        last, text = run.last_execution, run.streaming.explain()
    assert f"measured: {last.device_ns / 1e6:.3f} ms" in text
    assert f"waited {last.stream_wait_ns / 1e6:.3f} ms" in text
    assert 0 <= last.stream_wait_ns <= last.device_ns
    rate = last.bytes_streamed / last.stream_busy_ns * 1e9
    assert last.stream_bytes_per_second == pytest.approx(rate)
    assert "of weights streamed at" in str(last)


def test_the_report_says_what_streaming_cost(deep: Captured) -> None:
    with deep.load(weights_budget=floor_of(deep)) as run:
        executions = []
        for _ in range(3):
            run(torch.randn(4, 128))
            executions.append(run.last_execution)
        plan, report = run.streaming.plan, report_on(run, executions)
    assert report.streaming is not None
    assert report.streaming.streamed_bytes == plan.transfer_bytes == executions[0].bytes_streamed
    assert report.streaming.memory_bytes <= report.streaming.budget_bytes
    assert report.streaming.predicted_ns == plan.period_ns
    assert report.streaming.measured_ns == sorted(one.device_ns for one in executions)[1]
    rows = dict(zip(*(column.cells for column in report_table(report).columns), strict=True))
    assert rows["  streamed by an execution"] == f"{plan.transfer_bytes:,} bytes"
    assert rows["  streamed at"].endswith("/s")
    with deep.load() as run:
        run(torch.randn(4, 128))
        assert report_on(run, [run.last_execution]).streaming is None


def test_a_timeline_shows_waits_by_launch_beside_what_was_predicted(deep: Captured) -> None:
    with deep.load(weights_budget=floor_of(deep)) as run:
        run(torch.randn(4, 128))
        with run.timeline(NO_HEADER) as timeline:
            run(torch.randn(4, 128))
        plan, last, program = run.streaming.plan, run.last_execution, run.program
    (one,) = timeline.executions
    groups = launch_groups(timeline.executions)
    assert sum(group.wait_ns for group in groups) == last.stream_wait_ns
    copies = [span for span in one.predicted if span.kind is SpanKind.WEIGHTS]
    streamed = {program.values[plan.pieces[each.piece].value].name for each in plan.transfers}
    assert {span.name for span in copies} == streamed
    assert all(span.duration_ns > 0 and span.size_bytes > 0 for span in copies)
    ends = 0
    for span in copies:  # one lane, one at a time; times are rounded to a ns
        assert span.begin_ns >= ends - 1
        ends = span.end_ns
    launches = [span for span in one.predicted if span.kind is SpanKind.LAUNCH]
    waits = {span.launch: span for span in one.predicted if span.kind is SpanKind.WAIT}
    assert [span.launch for span in launches] == list(range(len(program.launches)))
    assert waits  # at the floor nothing is copied ahead
    for span in launches:
        if span.launch in waits:
            assert waits[span.launch].end_ns == span.begin_ns
    with deep.load() as resident:
        resident(torch.randn(4, 128))
        with resident.timeline(NO_HEADER) as timeline:
            resident(torch.randn(4, 128))
    assert {span.kind for span in timeline.executions[0].predicted} == {
        SpanKind.STAGE,
        SpanKind.LAUNCH,
    }


def test_loading_says_how_far_it_is(deep: Captured) -> None:
    for budget in (None, floor_of(deep) + 100 * KIB):
        told: list[tuple[int, int, str]] = []
        with deep.load(
            weights_budget=budget, progress=lambda *one, told=told: told.append(one)
        ) as run:
            resident_bytes = run.streaming.plan.resident_bytes
        whats = list(dict.fromkeys(what for _, _, what in told))
        assert whats == ["reading weights", *["timing launches"] * (budget is not None)]
        told = [one for one in told if one[2] == "reading weights"]
        begins = [index for index, (done_bytes, *_) in enumerate(told) if done_bytes == 0]
        assert begins[0] == 0
        assert len(begins) == (1 if budget is None else 2)  # launches are timed first
        last = told[begins[-1] :]
        assert [done_bytes for done_bytes, *_ in last] == sorted({one for one, *_ in last})
        assert {total_bytes for _, total_bytes, _ in last} == {resident_bytes}
        assert last[-1][0] == resident_bytes


def test_what_progress_raises_ends_the_load(deep: Captured) -> None:
    def stop(done_bytes: int, total_bytes: int, what: str) -> None:
        if done_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deep.load(progress=stop)
    with deep.load() as run:
        run(torch.randn(4, 128))
