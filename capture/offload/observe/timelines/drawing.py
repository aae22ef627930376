"""Draws time charts with matplotlib, without pyplot's global state. Lengths are in points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from offload.observe.timelines.chart import (
    FONTS,
    SMALL_SIZE,
    TEXT_SIZE,
    TIMES,
    Chart,
    Dimension,
    Label,
    Lane,
    Scale,
    inside_text,
    labels_of,
    text_width,
    time_unit,
)
from offload.observe.timelines.folding import Block
from offload.timeline.spans import Span, SpanKind

_INK, _FAINT, _RULE = "#222222", "#8a8a8a", "#d0d0d0"
_STAGES = {
    "convert": "#fee0b6",
    "drain": "#fed3a0",
    "policy": "#fdc58a",
    "patch": "#fca55d",
    "submit": "#f48a4a",
}
_KINDS = {
    SpanKind.STAGE: "#e8c9a8",
    SpanKind.SUBSTAGE: "#f7b183",
    SpanKind.ISSUE: "#b5b0d8",
    SpanKind.LAUNCH: "#74b3dd",
    SpanKind.TRANSFER: "#86cb8b",
    SpanKind.WEIGHTS: "#5fb3a1",
    SpanKind.WAIT: "#d9d9d9",
    SpanKind.COLLECTIVE: "#d98ba6",
}
_KIND_NAMES = {
    SpanKind.SUBSTAGE: "of submit",
    SpanKind.ISSUE: "issue by the host",
    SpanKind.LAUNCH: "launch",
    SpanKind.TRANSFER: "transfer",
    SpanKind.WEIGHTS: "weights copied",
    SpanKind.WAIT: "wait for weights",
    SpanKind.COLLECTIVE: "collective",
}

_LEFT, _RIGHT = 84.0, 18.0
_HEADING, _TITLE, _TICKS, _LEGEND = 30.0, 20.0, 28.0, 22.0
_DIMENSION, _NO_DIMENSION = 26.0, 4.0
_BAR, _BELOW_BAR, _LABEL_ROW = 24.0, 12.0, 11.0
_BEHIND_TEXT = 1.5


def draw_charts(figures: Sequence[tuple[str, Sequence[Chart]]], width: float) -> Figure:
    """Draw headings, each with its charts, one below another, and the legend.

    Args:
        figures: at least one, of at least one chart.
        width: of the whole; the height follows.
    """
    axis_width = width - _LEFT - _RIGHT
    boxes = [
        (heading, [_ChartBox(chart, axis_width) for chart in charts]) for heading, charts in figures
    ]
    height = _LEGEND + sum(_HEADING + sum(box.height for box in column) for _, column in boxes)
    figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), frame_on=False)
    page.set_axis_off()
    top = 0.0
    for heading, column in boxes:
        _write(page, (10, top + 20), heading, fontsize=11.5, weight="bold")
        top += _HEADING
        for box in column:
            _write(page, (10, top + 11), box.chart.title, fontsize=9.5)
            bottom = top + box.height - _TICKS
            inner = bottom - top - _TITLE
            box.draw(
                figure.add_axes(
                    (_LEFT / width, 1 - bottom / height, axis_width / width, inner / height),
                    xlim=(0, axis_width),
                    ylim=(inner, 0),
                )
            )
            top += box.height
    _draw_legend(page, [chart for _, charts in figures for chart in charts], top + 8)
    return figure


class _ChartBox:
    """A chart with its layout: lanes are as high as their labels require."""

    def __init__(self, chart: Chart, axis_width: float) -> None:
        self.chart = chart
        self._width = axis_width
        self._scale = Scale(chart.begin_ns, chart.end_ns, axis_width)
        self._labels = [labels_of(chart, lane, axis_width) for lane in chart.lanes]
        self._tops = [_DIMENSION if chart.above else _NO_DIMENSION]
        for labels in self._labels:
            rows = 1 + max((label.row for label in labels), default=-1)
            self._tops.append(self._tops[-1] + _BAR + _BELOW_BAR + rows * _LABEL_ROW)
        self.height = _TITLE + self._tops[-1] + (_DIMENSION if chart.below else 0.0) + _TICKS

    def draw(self, axes: Axes) -> None:
        """Draw into axes with one point per unit, counted from the upper left."""
        self._draw_time_axis(axes)
        for lane, labels, top in zip(self.chart.lanes, self._labels, self._tops[:-1], strict=True):
            self._draw_lane(axes, lane, top)
            _draw_labels(axes, labels, top + _BAR)
        for begin_ns, end_ns, lane_index in self.chart.arrows:
            begin = (self._scale.place(begin_ns), self._tops[0] + _BAR)
            end = (self._scale.place(end_ns), self._tops[lane_index])
            _draw_arrow(axes, begin, end, "-|>")
        for dimension in self.chart.above:
            self._draw_dimension(axes, dimension, _DIMENSION - 7, _DIMENSION - 19)
            if dimension.header:
                x, bottom = self._scale.place(dimension.end_ns), self._tops[-1]
                axes.plot(
                    [x, x],
                    [_DIMENSION - 11, bottom],
                    color=_INK,
                    linewidth=0.6,
                    linestyle=(0, (3, 2)),
                    zorder=_BEHIND_TEXT,
                )
        for dimension in self.chart.below:
            self._draw_dimension(axes, dimension, self._tops[-1] + 2, self._tops[-1] + 12)

    def _draw_time_axis(self, axes: Axes) -> None:
        length_ns = self.chart.end_ns - self.chart.begin_ns
        size_ns, unit = time_unit(length_ns)
        locator = MaxNLocator(8, steps=[1, 2, 5, 10])
        ticks = [
            tick
            for tick in locator.tick_values(0, length_ns / size_ns)
            if 0 <= tick <= length_ns / size_ns
        ]
        places = [self._scale.place(self.chart.begin_ns + tick * size_ns) for tick in ticks]
        axes.set_xticks(places, [f"{tick:,g}" for tick in ticks], fontfamily=FONTS)
        axes.tick_params(
            axis="x", labelsize=SMALL_SIZE, labelcolor=_FAINT, color=_FAINT, length=3.0
        )
        axes.set_yticks([])
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_FAINT)
        _write(axes, (self._width + 5, axes.get_ylim()[0]), unit, color=_FAINT)

    def _draw_lane(self, axes: Axes, lane: Lane, top: float) -> None:
        middle = top + _BAR / 2
        name_at = (-8, middle if lane.measured else middle - 5)
        _write(axes, name_at, lane.name, fontsize=TEXT_SIZE, ha="right")
        if not lane.measured:
            _write(axes, (-8, middle + 6), "predicted", color=_FAINT, ha="right")
        rule = [top + _BAR] * 2
        axes.plot([0, self._width], rule, color=_RULE, linewidth=0.6, zorder=0.5)
        for block in lane.blocks:
            left, right = self._scale.place(block.begin_ns), self._scale.place(block.end_ns)
            _draw_block(axes, block, (left, top), right - left, lane.measured)
            inside = inside_text(block, right - left)
            if inside:
                _write(axes, ((left + right) / 2, middle), inside, ha="center")

    def _draw_dimension(
        self, axes: Axes, dimension: Dimension, line_y: float, text_y: float
    ) -> None:
        """Draw a dimension; its text is centred, or begins with the line if that is too short."""
        left, right = self._scale.place(dimension.begin_ns), self._scale.place(dimension.end_ns)
        for x in (left, right):
            axes.plot([x, x], [line_y - 3, line_y + 3], color=_INK, linewidth=0.8)
        _draw_arrow(axes, (left, line_y), (right, line_y), "<|-|>" if right - left > 16 else "-")
        size, weight = (9.5, "bold") if dimension.header else (TEXT_SIZE, "normal")
        wide = text_width(dimension.text, size, weight)
        start = left if wide > right - left else (left + right - wide) / 2
        start = max(0.0, min(start, self._width - wide))
        _write(axes, (start, text_y), dimension.text, fontsize=size, weight=weight)


def _draw_block(
    axes: Axes, block: Block, corner: tuple[float, float], width: float, measured: bool
) -> None:
    """Draw a bar, filled from below to its busy share.

    A duration too short to see is one point wide and has no outline.
    """
    left, top = corner
    colour = _colour(block.spans[0])
    outline: dict[str, Any] = {"linewidth": 0}
    if width > 2:
        outline = {"linewidth": 0.5, "edgecolor": "white"}
        if not measured:
            outline |= {"edgecolor": _INK, "linestyle": (0, (2, 1.5))}
    width = max(width, 1.0)
    share = min(1.0, block.busy_share)
    if share < 1:
        pale = Rectangle((left, top), width, _BAR, facecolor=colour, alpha=0.3, linewidth=0)
        axes.add_patch(pale)
    bar = Rectangle((left, top + (1 - share) * _BAR), width, share * _BAR, **outline)
    bar.set_facecolor(colour if measured else (colour, 0.45))
    axes.add_patch(bar)


def _draw_labels(axes: Axes, labels: Sequence[Label], top: float) -> None:
    for label in labels:
        y = top + 8 + label.row * _LABEL_ROW
        axes.plot([label.anchor] * 2, [top, y - 3], color=_FAINT, linewidth=0.5)
        text = _write(axes, (label.left, y), label.text)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})


def _draw_arrow(
    axes: Axes, begin: tuple[float, float], end: tuple[float, float], style: str
) -> None:
    arrow = {"arrowstyle": style, "color": _INK, "linewidth": 0.7, "mutation_scale": 6}
    arrow |= {"shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=begin, arrowprops=arrow, zorder=_BEHIND_TEXT)


def _draw_legend(page: Axes, charts: Sequence[Chart], y: float) -> None:
    blocks = [block for chart in charts for lane in chart.lanes for block in lane.blocks]
    spans = [block.spans[0] for block in blocks]
    entries = {span.name: _colour(span) for span in spans if span.kind is SpanKind.STAGE}
    kinds = {span.kind for span in spans}
    entries |= {name: _KINDS[kind] for kind, name in _KIND_NAMES.items() if kind in kinds}
    left = _LEFT
    for text, colour in entries.items():
        page.add_patch(Rectangle((left, y - 4), 11, 8, facecolor=colour, linewidth=0))
        _write(page, (left + 15, y), text)
        left += 27 + text_width(text)
    if any(len(block.spans) > 1 for block in blocks):
        rule = f"{TIMES}n: n neighbours folded into a block, filled to the share that they take"
        _write(page, (left, y), rule)


def _write(axes: Axes, at: tuple[float, float], text: str, **style: Any) -> Text:
    """Write text literally, without parsing formulas."""
    given: dict[str, Any] = {"fontsize": SMALL_SIZE, "color": _INK, "va": "center"}
    return axes.text(*at, text, family=FONTS, parse_math=False, **(given | style))


def _colour(span: Span) -> str:
    if span.kind is SpanKind.STAGE:
        return _STAGES.get(span.name, _KINDS[span.kind])
    return _KINDS[span.kind]
