"""The two figures of a timeline: the comparison of schedulings, and one execution over time."""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure

from offload.console.amounts import show_count
from offload.errors import TimelineError
from offload.observe.timelines.chart import FONTS, Chart, Dimension, Lane, duration_text, lanes_of
from offload.observe.timelines.drawing import draw_charts
from offload.observe.timelines.folding import FEW_SPANS, fold
from offload.observe.timelines.summary import (
    Quantity,
    extent_ns,
    measured_of,
    representative,
    shown_spans,
)
from offload.timeline.spans import ExecutionTimeline, Span, SpanKind

if TYPE_CHECKING:
    from offload.timeline.timeline import Timeline

_WIDTH = 720.0
_FORMATS = (".svg", ".pdf", ".png")
_NAMES = {"host": "Host-bound scheduling", "offload": "Model offload scheduling"}


def save_figures(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw the figures into one file.

    Args:
        timeline: at least one execution with spans.
        path: ends in `.svg`, `.pdf` or `.png`.

    Raises:
        TimelineError: the path has another ending.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise TimelineError(
            f"{path}: a picture's name must end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        )
    if path.suffix == ".svg":
        path.write_text(figures_svg(timeline), "utf-8")
    else:
        with _settings():
            draw_figures(timeline).savefig(path, dpi=200)


def figures_svg(timeline: Timeline) -> str:
    """The figures as SVG."""
    text = io.StringIO()
    with _settings():
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw_figures(timeline).savefig(text, format="svg", metadata=nothing)
    return text.getvalue()


def draw_figures(timeline: Timeline) -> Figure:
    """The comparison, if both schedulings are known, above one execution over time."""
    executions = timeline.executions
    host, offload = (representative(executions, name) for name in ("host", "offload"))
    figures = []
    if host and offload:
        figures.append(
            (
                "Host-bound scheduling against model offload scheduling, end to end",
                _comparison(timeline, host, offload),
            )
        )
    shown = offload or host
    if shown is None:
        names = ", ".join(sorted({one.scheduling for one in executions}))
        raise TimelineError(f"expected executions of host or offload scheduling, got: {names}")
    figures.append(
        ("Host/device time sequence of one execution", _sequence(timeline, shown)),
    )
    return draw_charts(figures, _WIDTH)


def _settings() -> AbstractContextManager[None]:
    """Settings: text stays searchable text; the same timeline gives the same file."""
    return matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "offload", "font.family": list(FONTS)}
    )


def _comparison(
    timeline: Timeline, host: ExecutionTimeline, offload: ExecutionTimeline
) -> list[Chart]:
    """Both executions over the same length of time, with the time that the shorter one saves."""
    lengths_ns = {one.scheduling: extent_ns(shown_spans(one)) for one in (host, offload)}
    axis_ns = max(*lengths_ns.values(), 1)
    shorter = min(lengths_ns, key=lambda name: lengths_ns[name])
    charts = []
    for one in (host, offload):
        spans = shown_spans(one)
        begin_ns, length_ns = _begin_ns(spans), lengths_ns[one.scheduling]
        below = [Dimension(begin_ns, begin_ns + length_ns, _end_to_end(length_ns))]
        if one.scheduling == shorter and 0 < length_ns < axis_ns:
            below.append(
                Dimension(
                    begin_ns + length_ns,
                    begin_ns + axis_ns,
                    f"{duration_text(axis_ns - length_ns)} less: {axis_ns / length_ns:.2f} times "
                    f"as fast, {_basis(timeline)}",
                )
            )
        charts.append(
            Chart(
                f"{_NAMES[one.scheduling]} ({_which(timeline, one)})",
                begin_ns,
                begin_ns + axis_ns,
                lanes_of(spans, axis_ns, bool(one.spans)),
                above=_header_dimension(spans) if one is offload else (),
                below=tuple(below),
                arrows=_arrows(spans),
            )
        )
    return charts


def _sequence(timeline: Timeline, execution: ExecutionTimeline) -> list[Chart]:
    """The whole execution, predicted below measured, and its header enlarged."""
    spans = shown_spans(execution)
    predicted = execution.predicted if execution.spans else ()
    begin_ns = _begin_ns(spans)
    axis_ns = max(extent_ns(spans), extent_ns(predicted), 1)
    lanes = lanes_of(spans, axis_ns, bool(execution.spans))
    title = f"{_NAMES[execution.scheduling]} ({_which(timeline, execution)})"
    if predicted:
        lanes += lanes_of(predicted, axis_ns, measured=False)
        title += f": end to end {_prediction(extent_ns(spans), extent_ns(predicted))}"
    whole = Chart(
        title,
        begin_ns,
        begin_ns + axis_ns,
        lanes,
        above=_header_dimension(spans),
        below=(Dimension(begin_ns, begin_ns + extent_ns(spans), _end_to_end(extent_ns(spans))),),
        arrows=_arrows(spans),
    )
    return [whole, *_header_chart(spans, predicted)]


def _header_chart(spans: tuple[Span, ...], predicted: tuple[Span, ...]) -> list[Chart]:
    """The stages of m_l_t and the substages of submit; empty if the execution has no stages."""
    stages = _stages(spans)
    if not stages:
        return []
    begin_ns = _begin_ns(stages)
    predicted_stages = _stages(predicted)
    axis_ns = max(extent_ns(stages), extent_ns(predicted_stages), 1)
    lanes = lanes_of(stages, axis_ns)[:1]
    substages = [span for span in spans if span.kind is SpanKind.SUBSTAGE]
    if substages:
        lanes += (Lane("submit", fold(substages, axis_ns)),)
    title = "The header enlarged"
    if predicted_stages:
        lanes += lanes_of(predicted_stages, axis_ns, measured=False)[:1]
        title += f": m_l_t {_prediction(_sum_ns(stages), _sum_ns(predicted_stages))}"
    return [
        Chart(
            title,
            begin_ns,
            begin_ns + axis_ns,
            lanes,
            above=_header_dimension(stages),
            label_stages=True,
        )
    ]


def _header_dimension(spans: tuple[Span, ...]) -> tuple[Dimension, ...]:
    stages = _stages(spans)
    if not stages:
        return ()
    end_ns = max(span.end_ns for span in stages)
    text = f"m_l_t {duration_text(_sum_ns(stages))}"
    return (Dimension(_begin_ns(stages), end_ns, text, header=True),)


def _arrows(spans: tuple[Span, ...]) -> tuple[tuple[int, int, int], ...]:
    """Arrows from the submission to the first launch; with few issues, from each to its launch."""
    lanes = list(dict.fromkeys(("host", *(span.lane for span in spans))))
    launches = {span.launch: span for span in spans if span.kind is SpanKind.LAUNCH}
    issues = [span for span in spans if span.kind is SpanKind.ISSUE]
    if issues:
        causes = issues if len(issues) <= FEW_SPANS else issues[:1]
        pairs = [(one, launches[one.launch]) for one in causes if one.launch in launches]
    else:
        submissions = [span for span in _stages(spans) if span.name == "submit"]
        first = min(launches.values(), key=lambda span: span.begin_ns, default=None)
        pairs = [(one, first) for one in submissions if first is not None]
    return tuple(
        (cause.end_ns, launch.begin_ns, lanes.index(launch.lane))
        for cause, launch in pairs
        if launch.lane != "host"
    )


def _which(timeline: Timeline, execution: ExecutionTimeline) -> str:
    """Which execution is drawn, and why."""
    if not execution.spans:
        return "predicted"
    alike = measured_of(timeline.executions, execution.scheduling)
    launches = len(execution.of_kind(SpanKind.LAUNCH))
    number = f"execution {execution.number:,}, {show_count(launches, 'launch', 'launches')}"
    if len(alike) == 1:
        return number
    shortest, longest = (duration_text(extent_ns(one.spans)) for one in (alike[0], alike[-1]))
    return (
        f"{number}, the median of {len(alike):,} executions by total time, {shortest} to {longest}"
    )


def _basis(timeline: Timeline) -> str:
    """The basis of a comparison of both schedulings."""
    counts = [len(measured_of(timeline.executions, name)) for name in _NAMES]
    if 0 in counts:
        return "one side predicted" if any(counts) else "predicted"
    if 1 in counts:
        return "of one execution"
    return "of medians"


def _end_to_end(length_ns: int) -> str:
    return f"end to end {duration_text(length_ns)}"


def _prediction(measured_ns: int, predicted_ns: int) -> str:
    error = Quantity("", measured_ns, predicted_ns).error_percent
    by = "" if error is None else f" ({error:+.1f} %)".replace("-", "\N{MINUS SIGN}")
    return f"{duration_text(predicted_ns)} predicted{by}"


def _stages(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.kind is SpanKind.STAGE)


def _sum_ns(spans: tuple[Span, ...]) -> int:
    return sum(span.duration_ns for span in spans)


def _begin_ns(spans: tuple[Span, ...]) -> int:
    return min(span.begin_ns for span in spans)
