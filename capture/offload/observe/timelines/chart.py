"""Time charts: lanes of blocks over one time axis, with durations marked by dimension lines.

Defines the content of a chart and the positions of its texts; `drawing` draws it. Lengths are in
points, and only the axis counts time: the layout is determined by the text, so it stays readable
for any duration and number of launches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from offload.observe.timelines.folding import FEW_SPANS, Block, fold
from offload.timeline.spans import HOST_LANE, Span, SpanKind

FONTS = ("DejaVu Sans", "sans-serif")
TEXT_SIZE, SMALL_SIZE = 8.5, 7.0
TIMES = "\N{MULTIPLICATION SIGN}"

_LONGEST_NAME = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """A row of a chart.

    Attributes:
        name: shown at the left.
        blocks: its content, by begin.
        measured: predicted lanes are drawn pale with a dashed outline.
    """

    name: str
    blocks: tuple[Block, ...]
    measured: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension line from begin to end with its text.

    The header's is bold, and its end is marked on the lanes.
    """

    begin_ns: int
    end_ns: int
    text: str
    header: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """The content over one time axis.

    Attributes:
        title: above it.
        begin_ns, end_ns: of the axis, which counts from its begin.
        lanes: from top to bottom.
        above, below: dimension lines above and below the lanes; those of a row do not overlap.
        arrows: from a time on the first lane to a time on another one, by its index.
        label_stages: stages are labelled even if their names do not fit into them.
    """

    title: str
    begin_ns: int
    end_ns: int
    lanes: tuple[Lane, ...]
    above: tuple[Dimension, ...] = ()
    below: tuple[Dimension, ...] = ()
    arrows: tuple[tuple[int, int, int], ...] = ()
    label_stages: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """Text below a bar, in `row`, its left edge at `left`; a line leads to the bar at `anchor`."""

    text: str
    anchor: float
    left: float
    row: int


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """Places times on an axis that is `width` points wide."""

    begin_ns: int
    end_ns: int
    width: float

    def place(self, time_ns: float) -> float:
        """Points from the axis's left end."""
        return (time_ns - self.begin_ns) * self.width / max(1, self.end_ns - self.begin_ns)


def lanes_of(spans: Sequence[Span], drawn_ns: int, measured: bool = True) -> tuple[Lane, ...]:
    """The host's lane, then the others in order of appearance; spans of one kind are folded.

    Substages are omitted: they lie within a stage.
    """
    spans = [span for span in spans if span.kind is not SpanKind.SUBSTAGE]
    lanes = []
    for name in dict.fromkeys((HOST_LANE, *(span.lane for span in spans))):
        blocks = [
            block
            for kind in SpanKind
            for block in fold(
                [span for span in spans if span.lane == name and span.kind is kind], drawn_ns
            )
        ]
        blocks.sort(key=lambda block: (block.begin_ns, block.end_ns))
        shown = name if name == HOST_LANE else f"device {name}"
        lanes.append(Lane(shown, tuple(blocks), measured))
    return tuple(lanes)


def duration_text(duration_ns: float) -> str:
    """A duration of about three digits: `72 ns`, `1.98 µs`, `24.7 ms`."""
    size_ns, unit = time_unit(duration_ns)
    value = duration_ns / size_ns
    digits = 0 if unit == "ns" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def time_unit(duration_ns: float) -> tuple[float, str]:
    """The unit in which a duration is at least 1: its nanoseconds and its name."""
    units = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))
    return next((unit for unit in units if duration_ns >= unit[0]), (1.0, "ns"))


def labels_of(chart: Chart, lane: Lane, width: float) -> tuple[Label, ...]:
    """Labels below the bars of few spans whose names do not fit into them, without overlap.

    From right to left, each text begins at its bar and goes into the first free row: the lines to
    lower rows then pass at the left of the upper ones. At the right edge it is mirrored.

    Args:
        chart: contains the lane.
        lane: with the bars to label.
        width: of the axis.
    """
    wanted = _wanted_labels(chart, lane, Scale(chart.begin_ns, chart.end_ns, width))
    fitting = [one for one in reversed(wanted) if one[1] + one[2] <= width]
    mirrored = [one for one in wanted if one[1] + one[2] > width]
    rows: list[list[tuple[float, float]]] = []
    labels = []
    for text, anchor, text_wide in (*fitting, *mirrored):
        left = anchor - 2 if anchor + text_wide <= width else anchor + 2 - text_wide
        begin, end = left - 2, left + text_wide + 2
        free = (
            row
            for row, taken in enumerate(rows)
            if all(end < other_begin or other_end < begin for other_begin, other_end in taken)
        )
        row = next(free, len(rows))
        rows[row:] = rows[row:] or [[]]
        rows[row].append((begin, end))
        labels.append(Label(text, anchor, left, row))
    return tuple(labels)


def inside_text(block: Block, width: float) -> str:
    """The text in a bar: its name, or the number of folded spans; empty if it does not fit."""
    folded = len(block.spans) > 1
    text = f"{TIMES}{len(block.spans):,}" if folded else _short(block.spans[0].name)
    return text if text_width(text) + 3 <= width else ""


@functools.cache
def text_width(text: str, size: float = SMALL_SIZE, weight: str = "normal") -> float:
    """The width of a text."""
    font = FontProperties(family=FONTS[0], weight=weight, size=size)
    return float(TextPath((0, 0), text, prop=font).get_extents().width)


def _wanted_labels(chart: Chart, lane: Lane, scale: Scale) -> list[tuple[str, float, float]]:
    """Text, anchor and width of each, from left to right."""
    counts: Counter[SpanKind] = Counter()
    for block in lane.blocks:
        counts[block.spans[0].kind] += len(block.spans)
    wanted = []
    for block in lane.blocks:
        span = block.spans[0]
        stage = span.kind is SpanKind.STAGE
        left, right = scale.place(block.begin_ns), scale.place(block.end_ns)
        labelled = chart.label_stages if stage else counts[span.kind] <= FEW_SPANS
        if labelled and not inside_text(block, right - left):
            text = _short(span.name)
            wanted.append((text, (left + right) / 2, text_width(text)))
    return wanted


def _short(name: str) -> str:
    """An operator without namespace and overload: `aten::add.Tensor` as `add`."""
    short = name.rpartition("::")[2].partition(".")[0] if "::" in name else name
    return short if len(short) <= _LONGEST_NAME else f"{short[: _LONGEST_NAME - 1]}…"
