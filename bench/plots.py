"""Plots of a report's claims: curves if they were measured along an axis, else ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from measurements import Case, Claim, Curve

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "offload",  # the same report gives the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# Colour-blind safe, by Okabe and Ito (2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_ROW_INCHES, _HEAD_INCHES = 0.25, 0.45


def plot_claim(claim: Claim, path: Path) -> None:
    """Draw a claim as SVG: its curves if it has any, else the ratios of its promised quantity.

    Raises:
        ValueError: its cases have neither ratios nor curves.
    """
    with mpl.rc_context(_STYLE):
        if any(case.curves for case in claim.cases):
            picture = _curves([case for case in claim.cases if case.curves])
        else:
            picture = _ratios(_promised_about(claim))
        picture.suptitle(claim.text, x=0.01, ha="left", fontsize=11, fontweight="bold", wrap=True)
        picture.savefig(path, metadata={"Date": None})


def _promised_about(claim: Claim) -> list[Case]:
    """The cases, with ratios of time or bytes alone if the claim promises something about it."""
    ratios = [ratio for case in claim.cases for ratio in case.ratios.values()]
    kinds = {one.of for one in ratios if one.at_least is not None} or {one.of for one in ratios}
    cases = [
        Case(case.title, {name: one for name, one in case.ratios.items() if one.of in kinds})
        for case in claim.cases
    ]
    return [case for case in cases if case.ratios]


def _plain(number: float, _position: int = 0) -> str:
    return f"{number:,.0f}" if number >= 1_000 else f"{number:g}"


def _log_axis(axis: mpl.axis.Axis, low: float, high: float, ticks: Sequence[float] = ()) -> None:
    """A logarithmic axis: given ticks, else the decades, and ticks between if these are few."""
    subs: Sequence[float] = (1, 2, 5)
    if high / low > 300:
        subs = (1,)
    elif high / low < 4:
        subs = range(1, 10)
    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=subs, numticks=16))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_locator(NullLocator())


# ---- ratios -------------------------------------------------------------------------------------


def _ratios(cases: Sequence[Case]) -> Picture:
    """A panel for each case, a row for each ratio: median, interval, and the line of equality."""
    heights = [_HEAD_INCHES + _ROW_INCHES * len(case.ratios) for case in cases]
    picture = Picture(figsize=(8.5, sum(heights) + 1.3), layout="constrained")
    panels = picture.subplots(
        len(cases), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for panel, case in zip(panels, cases, strict=True):
        _ratio_panel(panel, case)
    low = min(ratio.low for case in cases for ratio in case.ratios.values())
    high = max(ratio.high for case in cases for ratio in case.ratios.values())
    panels[0].set_xscale("log")
    panels[0].set_xlim(min(low, 1) / 1.25, max(high, 1) * 1.9)  # space for the figures beside
    _log_axis(panels[-1].xaxis, min(low, 1), max(high, 1))
    of = {ratio.of for case in cases for ratio in case.ratios.values()}
    word = {"time": "fast", "bytes": "small"}
    words = " or ".join(word[one] for one in sorted(of, reverse=True))
    panels[-1].set_xlabel(f"offload is this many times as {words} (right of 1 is better)")
    return picture


def _ratio_panel(panel: Axes, case: Case) -> None:
    panel.axvline(1, color="0.5", linewidth=1)
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)
    rows = range(len(case.ratios))
    for row, ratio in zip(rows, case.ratios.values(), strict=True):
        colour = _COLOURS[0] if ratio.value >= 1 else _COLOURS[1]
        panel.errorbar(
            ratio.value,
            row,
            xerr=[[ratio.value - ratio.low], [ratio.high - ratio.value]],
            fmt="o",
            color=colour,
            capsize=3,
            markersize=5,
        )
        panel.annotate(
            f"{ratio.value:.3g}",
            (ratio.high, row),
            (7, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    panel.set_yticks(rows, list(case.ratios))
    panel.set_ylim(len(case.ratios) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.set_title(case.title, loc="left", fontsize=10)


# ---- curves -------------------------------------------------------------------------------------


def _curves(cases: Sequence[Case]) -> Picture:
    """A panel for each case: medians with their interval, quartiles as a band."""
    picture = Picture(figsize=(8.5, 0.9 + 3.6 * len(cases)), layout="constrained")
    panels = picture.subplots(len(cases), 1, squeeze=False)[:, 0]
    for panel, case in zip(panels, cases, strict=True):
        for index, (name, curve) in enumerate(case.curves.items()):
            _line(panel, name, curve, index)
        x_names = {curve.x_name for curve in case.curves.values()}
        figures = [figure for curve in case.curves.values() for figure in curve.figures]
        units = {figure.unit for figure in figures}
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(", ".join(sorted(x_names)))
        panel.set_ylabel(f"{', '.join(sorted(units))} (band: quartiles)")
        ticks = sorted({x for curve in case.curves.values() for x in curve.x})
        _log_axis(panel.xaxis, ticks[0], ticks[-1], ticks)
        _log_axis(panel.yaxis, min(one.low for one in figures), max(one.high for one in figures))
        panel.grid(color="0.92")
        panel.legend(frameon=False, loc="upper left")
    return picture


def _line(panel: Axes, name: str, curve: Curve, index: int) -> None:
    colour = _COLOURS[index % len(_COLOURS)]
    medians = [figure.value for figure in curve.figures]
    panel.errorbar(
        curve.x,
        medians,
        yerr=[
            [figure.value - figure.low for figure in curve.figures],
            [figure.high - figure.value for figure in curve.figures],
        ],
        label=name,
        color=colour,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=5,
        capsize=3,
    )
    panel.fill_between(
        curve.x,
        [figure.q1 for figure in curve.figures],
        [figure.q3 for figure in curve.figures],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
