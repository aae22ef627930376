"""Folding, and positions of labels: for any spans nothing is lost and nothing overlaps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import launch, stage

from offload.observe.timelines.chart import Chart, Lane, labels_of, lanes_of, text_width
from offload.observe.timelines.folding import BLOCKS_PER_LANE, FEW_SPANS, fold
from offload.timeline import Span

WIDTH = 618.0


@st.composite
def neighbours(draw: st.DrawFn) -> list[Span]:
    """Spans of one lane that do not overlap, of very different lengths and gaps."""
    pairs = draw(st.lists(st.tuples(durations(), durations()), max_size=200))
    spans, at_ns = [], 0
    for index, (gap_ns, duration_ns) in enumerate(pairs):
        spans.append(launch(index, at_ns + gap_ns, at_ns + gap_ns + duration_ns))
        at_ns += gap_ns + duration_ns
    return spans


def durations() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 20), st.integers(0, 2000), st.just(0))


@given(neighbours())
@settings(max_examples=200, deadline=None)
def test_any_lane(spans: list[Span]) -> None:
    drawn_ns = max((span.end_ns for span in spans), default=1) or 1
    blocks = fold(spans, drawn_ns)
    assert [span for block in blocks for span in block.spans] == spans
    assert len(blocks) <= max(FEW_SPANS, 2 * BLOCKS_PER_LANE + 1)
    for block in blocks:
        assert 0 <= block.busy_share <= 1
        assert block.busy_ns == sum(span.duration_ns for span in block.spans)
        wide_ns = drawn_ns / BLOCKS_PER_LANE
        if len(block.spans) > 1:
            assert all(span.duration_ns < wide_ns for span in block.spans)
            gaps = itertools.pairwise(block.spans)
            assert all(after.begin_ns - before.end_ns < wide_ns for before, after in gaps)


def test_few_are_not_folded() -> None:
    spans = [launch(i, i, i + 1) for i in range(FEW_SPANS)]
    assert len(fold(spans, 1_000_000)) == FEW_SPANS


def test_a_long_launch_stands_alone_and_a_long_gap_stays_visible() -> None:
    short = [launch(i, 10 * i, 10 * i + 5) for i in range(50)]
    long = launch(50, 500, 5500)
    later = [launch(51 + i, 9000 + 10 * i, 9005 + 10 * i) for i in range(20)]
    counts = [len(block.spans) for block in fold([*short, long, *later], 10_000)]
    assert counts == [50, 1, 20]


def test_a_folded_block_knows_its_busy_share() -> None:
    (block,) = fold([launch(i, 4 * i, 4 * i + 1) for i in range(100)], 100_000)
    assert block.busy_share == 100 / (4 * 99 + 1)


@pytest.mark.slow
@given(neighbours().map(lambda spans: spans[:FEW_SPANS]))
@settings(max_examples=200, deadline=None)
def test_every_launch_of_few_is_labelled_and_no_labels_overlap(spans: list[Span]) -> None:
    end_ns = max((span.end_ns for span in spans), default=0)
    lanes = lanes_of(spans, end_ns)
    chart = Chart("", 0, end_ns, lanes)
    scale = WIDTH / max(1, end_ns)
    for lane in lanes[1:]:
        labels = labels_of(chart, lane, WIDTH)
        inside = [
            span for span in spans if text_width(short(span.name)) + 3 <= span.duration_ns * scale
        ]
        assert len(labels) + len(inside) == len(spans)
        for label in labels:
            assert -2 <= label.left <= WIDTH
        places = sorted((one.row, one.left, one.left + text_width(one.text)) for one in labels)
        for (row, _, end), (next_row, next_left, _) in itertools.pairwise(places):
            assert row != next_row or end < next_left


def short(name: str) -> str:
    return name.removeprefix("aten::").removesuffix(".Tensor")


def test_stages_are_labelled_only_where_they_are_enlarged() -> None:
    (lane,) = lanes_of([stage("convert", 0, 990), stage("policy", 990, 1000)], 1000)
    assert isinstance(lane, Lane)
    assert labels_of(Chart("", 0, 1000, (lane,)), lane, WIDTH) == ()
    (label,) = labels_of(Chart("", 0, 1000, (lane,), label_stages=True), lane, WIDTH)
    assert label.text == "policy"
