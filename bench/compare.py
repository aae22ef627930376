"""Tells a change from noise between two reports of the benchmarks.

Usage: python bench/compare.py OLD NEW, each a file or a folder of them.

Ratios are compared, never times: a ratio was measured within one run, so that another machine or a
busier one does not appear as a change. Each ratio has a 99 % interval, from the rounds of its own
run. The rule:

* A timed ratio has changed if the two intervals have no value in common **and** the medians differ
  by more than the tolerance, in either direction. The intervals cover the noise within a run. The
  tolerance, 30 % by default, covers what differs between runs and is the same for all rounds
  of one: addresses of memory and code, and other load of the machine. Two runs of one version,
  one of them on a machine with more work than processors, were seen to differ by 28 %.
* A counted ratio, whose interval has no width in either report, has changed if it differs at all.
* Otherwise it is within noise: changes below the tolerance are not reported.

A folder may hold several runs. A ratio that was measured in more than one counts with the median of
its medians, and with the interval from the lowest to the highest bound. Between single runs of one
version, on a machine with varying other load, up to 2 of 81 ratios were reported as slower (files
that are loaded, copies of many MiB): take two runs or more of each side, in turns, before trusting
a result.

A ratio is how many times as fast, or as small, we are, so that less is worse. Ratios in only one
report are listed, with the reason if a peer was absent, and do not affect the outcome.

Exit status: 0 if nothing got slower or larger, 1 if something did, 2 if the reports cannot be read
or have no ratio in common.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from measurements import Ratio, Report, ReportError, read_report

TOLERANCE = 0.30

_BETTER = {"time": "faster", "bytes": "smaller"}
_WORSE = {"time": "slower", "bytes": "larger"}
_STYLES = {"faster": "green", "smaller": "green", "slower": "red", "larger": "red"}

Key = tuple[str, str, str]
"""Claim, case, and contender."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One ratio in both reports; None where a report lacks it, for the reason in `note`."""

    key: Key
    old: Ratio | None
    new: Ratio | None
    verdict: str
    note: str = ""

    @property
    def worse(self) -> bool:
        """Return whether we got slower or larger."""
        return self.verdict in _WORSE.values()


def verdict_of(old: Ratio, new: Ratio, tolerance: float = TOLERANCE) -> str:
    """`faster`, `slower`, `smaller`, `larger` or `within noise`, by the rule of this module."""
    counted = old.low == old.high and new.low == new.high
    apart = old.high < new.low or new.high < old.low
    changed = (
        not math.isclose(old.value, new.value, rel_tol=1e-5)  # reports hold six digits
        if counted
        else apart and max(old.value / new.value, new.value / old.value) > 1 + tolerance
    )
    if not changed:
        return "within noise"
    return (_BETTER if new.value > old.value else _WORSE)[new.of]


def compare(old: Report, new: Report, tolerance: float = TOLERANCE) -> tuple[Comparison, ...]:
    """Compare every ratio of either report."""
    before, after = _ratios(old), _ratios(new)
    why_not = {**dict(_absences(old)), **dict(_absences(new))}
    comparisons = []
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            verdict = "only in new" if one is None else "only in old"
            comparisons.append(Comparison(key, one, other, verdict, why_not.get(key, "")))
        else:
            comparisons.append(Comparison(key, one, other, verdict_of(one, other, tolerance)))
    return tuple(comparisons)


def _ratios(report: Report) -> dict[Key, Ratio]:
    runs: dict[Key, list[Ratio]] = {}
    for claim in report.claims:
        for case in claim.cases:
            for name, ratio in case.ratios.items():
                runs.setdefault((claim.name, case.title, name), []).append(ratio)
    return {key: _of_runs(ratios) for key, ratios in runs.items()}


def _of_runs(ratios: list[Ratio]) -> Ratio:
    """Combine one ratio from several runs."""
    return dataclasses.replace(
        ratios[0],
        value=statistics.median(one.value for one in ratios),
        low=min(one.low for one in ratios),
        high=max(one.high for one in ratios),
    )


def _absences(report: Report) -> Iterator[tuple[Key, str]]:
    for claim in report.claims:
        for case in claim.cases:
            for name, why in case.absent.items():
                yield (claim.name, case.title, name), why


def comparison_table(comparisons: tuple[Comparison, ...]) -> Table:
    """The comparisons, changes first."""
    table = Table(title="times as fast or small as", title_justify="left")
    for heading in ("claim", "case", "against"):
        table.add_column(heading, overflow="fold")
    for heading in ("old", "new", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for one in sorted(comparisons, key=lambda one: one.verdict == "within noise"):
        change = ""
        if one.old is not None and one.new is not None:
            change = f"{one.new.value / one.old.value - 1:+.1%}"
        verdict = f"{one.verdict}: {one.note}" if one.note else one.verdict
        table.add_row(
            *one.key,
            _text(one.old),
            _text(one.new),
            change,
            verdict,
            style=_STYLES.get(one.verdict),
        )
    return table


def _text(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.value:.3g} ({ratio.low:.3g} to {ratio.high:.3g})"


_HELP = (__doc__ or "").replace("\n\n*", "\n\n\b\n*")  # \b: click leaves the list unchanged


@click.command(help=_HELP)
@click.argument("old", type=click.Path(exists=True, path_type=Path))
@click.argument("new", type=click.Path(exists=True, path_type=Path))
@click.option("--tolerance", default=TOLERANCE, show_default=True, help="As a fraction.")
def main(old: Path, new: Path, tolerance: float) -> None:
    """Compare two reports; `help` is this module's docstring."""
    try:
        before, after = read_report(old), read_report(new)
    except ReportError as error:
        raise click.UsageError(str(error)) from error
    comparisons = compare(before, after, tolerance)
    if not any(one.old and one.new for one in comparisons):
        raise click.UsageError(f"{old} and {new} have no ratio in common")
    console = Console()
    console.print(comparison_table(comparisons))
    for name in sorted(before.machine.keys() | after.machine.keys()):
        if before.machine.get(name) != after.machine.get(name):
            console.print(f"not the same {name}: {before.machine.get(name)}")
            console.print(f"  against {after.machine.get(name)}")
    worse = sum(one.worse for one in comparisons)
    console.print(f"{worse} of {len(comparisons)} slower or larger")
    if worse:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
