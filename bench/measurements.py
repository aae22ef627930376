"""Measurements: the records of a benchmark, and their stored reports.

A benchmark gives a `Case` to the `record` fixture, which stores it in pytest-benchmark's report;
`read_report` reads it back. A file of benchmarks is one claim, and a test in it one case.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.99
"""Confidence of each interval. Reports hold some fifty ratios: at 0.95 some differ by chance."""

_RESAMPLES = 2_000
_BOOTSTRAP_VALUES = 8


class ReportError(ValueError):
    """A file is no report of benchmarks, or holds no claim."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, or as small, we are as a contender of the same run.

    Attributes:
        value: the median of the rounds' ratios; more is better.
        low, high: its interval. Both are `value` if it is counted, not timed.
        of: `time` or `bytes`.
        at_least: the claim's promise; None without a promise.
    """

    value: float
    low: float
    high: float
    of: str = "time"
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None without one, or if the interval does not decide."""
        if self.at_least is None or self.low < self.at_least <= self.high:
            return None
        return self.low >= self.at_least


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A measured quantity in its unit: the median, its interval, and the quartiles of the rounds.

    `low` and `high` state the uncertainty of the median, `q1` and `q3` the spread of the rounds.
    """

    value: float
    low: float
    high: float
    q1: float
    q3: float
    n_rounds: int
    unit: str


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Figures along an axis: `figures[i]` was measured at `x[i]`."""

    x_name: str
    x: tuple[float, ...]
    figures: tuple[Figure, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """The result of one benchmark.

    Attributes:
        title: the model or instance, for tables and plots.
        ratios: by contender.
        figures: by name; the absolute quantities behind the ratios.
        curves: by series; all of one benchmark have one x axis and unit.
        absent: peers that could not take part, with the reason.
    """

    title: str
    ratios: Mapping[str, Ratio] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Curve] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """The cases of one file. `name` is the file's, without `bench_`; `text` is the claim."""

    name: str
    text: str
    cases: tuple[Case, ...]

    @property
    def met(self) -> bool | None:
        """Whether all promises are kept; None without promises, or if some are not decided."""
        verdicts = {
            ratio.met
            for case in self.cases
            for ratio in case.ratios.values()
            if ratio.at_least is not None
        }
        if False in verdicts:
            return False
        return None if None in verdicts or not verdicts else True


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All claims of one run on one machine. `machine` is shown, never computed with."""

    machine: Mapping[str, Any]
    claims: tuple[Claim, ...]


# ---- statistics ---------------------------------------------------------------------------------


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the median; the same values give the same interval.

    By the percentile bootstrap. Fewer than eight values are too few at this confidence: all of
    three lie on one side of the median once in four times. They are assumed log-normal instead, for
    which Student's t gives a suitably wide interval.

    Raises:
        ValueError: fewer than three values, or fewer than eight of which one is not positive.
    """
    if len(values) < 3:
        raise ValueError(f"an interval needs three rounds or more, got {len(values)}")
    if min(values) == max(values):
        return values[0], values[0]
    if len(values) < _BOOTSTRAP_VALUES:
        if min(values) <= 0:
            raise ValueError(f"so few values must be positive, got {min(values)}")
        logarithms = np.log(values)
        low, high = stats.t.interval(
            CONFIDENCE,
            len(values) - 1,
            loc=np.median(logarithms),
            scale=stats.sem(logarithms),
        )
        return math.exp(low), math.exp(high)
    interval = stats.bootstrap(
        (np.asarray(values),),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def figure_of(values: Sequence[float], unit: str) -> Figure:
    """The figure of one value per round.

    Raises:
        ValueError: fewer than three values.
    """
    q1, median, q3 = (float(one) for one in np.quantile(values, [0.25, 0.5, 0.75]))
    return Figure(median, *median_interval(values), q1, q3, len(values), unit)


def counted_figure(value: float, unit: str) -> Figure:
    """A counted or predicted quantity: an interval without width."""
    return Figure(value, value, value, value, value, 1, unit)


def ratio_of(
    theirs: Sequence[float],
    ours: Sequence[float],
    *,
    of: str = "time",
    at_least: float | None = None,
) -> Ratio:
    """Return how many times as fast or small ours is, from values of the same rounds.

    Each round gives one ratio, so that disturbances of a whole round cancel. They may take part in
    only the first rounds.

    Raises:
        ValueError: fewer than three rounds, or more of theirs than of ours.
    """
    ratios = [their / our for their, our in zip(theirs, ours[: len(theirs)], strict=True)]
    low, high = median_interval(ratios)
    return Ratio(float(np.median(ratios)), low, high, of, at_least)


def counted_ratio(
    theirs: float, ours: float, *, of: str = "bytes", at_least: float | None = None
) -> Ratio:
    """The ratio of two counted numbers: an interval without width."""
    return Ratio(theirs / ours, theirs / ours, theirs / ours, of, at_least)


# ---- stored reports -----------------------------------------------------------------------------


def as_json(name: str, claim: str, case: Case) -> dict[str, Any]:
    """A case as pytest-benchmark stores it; numbers are rounded to six digits."""
    stored = {"name": name, "text": claim, "case": dataclasses.asdict(case)}
    rounded: dict[str, Any] = json.loads(
        json.dumps(stored), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    return rounded


def read_report(path: Path) -> Report:
    """Read a report, or every report in a folder as one.

    Benchmarks that recorded no case are left out.

    Raises:
        ReportError: a file is no report, or no file has a claim.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    machine: dict[str, Any] = {}
    texts: dict[str, str] = {}
    cases: dict[str, list[Case]] = {}
    for file in files:
        stored = _read_json(file)
        machine |= stored["machine_info"]
        for benchmark in stored["benchmarks"]:
            if found := benchmark.get("extra_info", {}).get("measurements"):
                texts[found["name"]] = found["text"]
                cases.setdefault(found["name"], []).append(_case(found["case"]))
    if not cases:
        raise ReportError(f"{path}: no benchmark in it recorded a claim; run `make bench`")
    return Report(machine, tuple(Claim(name, texts[name], tuple(cases[name])) for name in cases))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{file}: not JSON: {error}") from None
    if not isinstance(stored, dict) or not {"machine_info", "benchmarks"} <= stored.keys():
        raise ReportError(f"{file}: expected a report of pytest-benchmark")
    return stored


def _case(stored: Mapping[str, Any]) -> Case:
    def each(kind: Callable[..., Any], field: str) -> dict[str, Any]:
        return {name: kind(**one) for name, one in stored[field].items()}

    def curve(x_name: str, x: list[float], figures: list[dict[str, Any]]) -> Curve:
        return Curve(x_name, tuple(x), tuple(Figure(**one) for one in figures))

    return Case(
        title=stored["title"],
        ratios=each(Ratio, "ratios"),
        figures=each(Figure, "figures"),
        curves=each(curve, "curves"),
        absent=dict(stored["absent"]),
    )


def reason(error: BaseException) -> str:
    """Why something is absent, in one line without the folders of this machine."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first.strip()}".rstrip(": ")
    return re.sub(r"(?:/[\w.+@-]+)+/", "", text)[:160]
