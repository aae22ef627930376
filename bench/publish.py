"""Makes the plots of a report, the README's table, and the tables of the measurements page.

Tables are written between two marker lines of each page, and plots beside the report, named after
it and the claim. The same report gives the same files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from measurements import Case, Claim, Figure, Ratio, Report, ReportError, read_report
from plots import plot_claim

BEGIN = "<!-- measurements: begin, written by bench/publish.py -->"
END = "<!-- measurements: end -->"
ROOT = Path(__file__).parents[1]
MAIN_CLAIM = "replay"
FUSION_CLAIM = "fusion"
OURS = "offload"
FUSED = "offload, fused"
QUICKEST = "the quickest peer, "
BASELINE = "eager"
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_VERDICTS = {True: "yes", False: "**no**", None: "not decided"}


class MarkersMissing(ValueError):
    """A page has not exactly one begin marker, followed by one end marker."""


def insert(page: str, text: str) -> str:
    """The page with `text` between its markers.

    Raises:
        MarkersMissing: the markers are missing, or not once each in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise MarkersMissing(f"expected once each, in this order:\n{BEGIN}\n{END}")
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


def machine_line(machine: dict[str, Any]) -> str:
    """The machine and the software, in a sentence."""
    cpu = machine.get("cpu", {}).get("brand_raw", "an unnamed processor")
    packages = machine.get("packages", {})
    named = {"torch": "torch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    versions = [f"{text} {packages[name]}" for name, text in named.items() if name in packages]
    return (
        f"One thread of a {machine.get('cores')}-core machine, {cpu}; "
        f"Python {machine.get('python_version')}, {', '.join(versions)}."
    )


def times_table(claim: Claim) -> str:
    """Models by contenders: the median time of a call in microseconds, and the gain over eager."""
    peers = [peer for peer in _common_peers(claim) if peer != BASELINE]
    lines = [
        f"| model | {BASELINE} | **{OURS}** | gain | " + " | ".join(peers) + " |",
        "|---" + "|---:" * (len(peers) + 3) + "|",
    ]
    for case in claim.cases:
        gain = case.ratios.get(BASELINE)
        cells = [
            case.title,
            _microseconds(case.figures.get(BASELINE)),
            f"**{_microseconds(case.figures.get(OURS))}**",
            "–" if gain is None else f"{_number(gain.value)} ×",
            *(_microseconds(case.figures.get(peer)) for peer in peers),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _common_peers(claim: Claim) -> list[str]:
    """The peers of every case, present or absent, in the order of the report."""
    tried = [{**case.ratios, **case.absent} for case in claim.cases]
    peers = dict.fromkeys(peer for one in tried for peer in one)
    return [peer for peer in peers if all(peer in one for one in tried)]


def _microseconds(figure: Figure | None) -> str:
    """Three digits of a time; a dash if nothing was measured."""
    if figure is None:
        return "–"
    in_microseconds = figure.value * _MICROSECONDS[figure.unit]
    return f"{in_microseconds:,.0f}" if in_microseconds >= 100 else f"{in_microseconds:#.3g}"


def peers_table(claim: Claim) -> str:
    """Models by peers: how many times as fast a replay is."""
    shown = _common_peers(claim)
    lines = ["| model | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for case in claim.cases:
        cells = [_cell(case.ratios.get(peer)) for peer in shown]
        lines.append(f"| {case.title} | " + " | ".join(cells) + " |")
    lines.append("")
    for case in claim.cases:
        others = [peer for peer in case.ratios if peer not in shown]
        lines += [f"{case.title}, {peer}: {_cell(case.ratios[peer])}." for peer in others]
    lines += [f"Absent: {one}." for one in _absences(claim)]
    return "\n".join(lines).strip()


def fused_table(claim: Claim) -> str:
    """Models by the time of a fused call, and its speed-up over others."""
    lines = ["| model | fused, us | unfused | the quickest peer | |", "|---|---:|---:|---:|---|"]
    for case in claim.cases:
        quickest = next((name for name in case.ratios if name.startswith(QUICKEST)), "")
        cells = [
            case.title,
            _microseconds(case.figures.get(FUSED)),
            _cell(case.ratios.get(OURS)),
            _cell(case.ratios.get(quickest)),
            quickest.removeprefix(QUICKEST),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{_number(ratio.value)} ({_range(ratio)})"


def _number(value: float) -> str:
    """Two digits below one, one after the point below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:#.2g}"


def _range(ratio: Ratio) -> str:
    return f"{_number(ratio.low)}–{_number(ratio.high)}"


def _absences(claim: Claim) -> Iterator[str]:
    for case in claim.cases:
        for peer, why in case.absent.items():
            yield f"{peer} for {case.title}: {why}"


def claims_table(report: Report, folder: str, stem: str) -> str:
    """Claims: the worst ratio, and whether all promises are kept."""
    lines = ["| claim | worst ratio | met |", "|---|---|---|"]
    for claim in report.claims:
        worst = worst_ratio(claim)
        found = verdict = "–"
        if worst is not None:
            case, name, ratio = worst
            counted = ratio.low == ratio.high
            figure = _number(ratio.value) if counted else _cell(ratio)
            is_promised = ratio.at_least is not None
            promise = f"promised {ratio.at_least:g}" if is_promised else "nothing promised here"
            verdict = _VERDICTS[claim.met] if is_promised else "–"
            found = f"{figure}, {promise}: {case.title}; {name}"
        link = f"[plot]({folder}/{stem}_{claim.name}.svg)"
        lines.append(f"| {claim.text} {link} | {found} | {verdict} |")
    return "\n".join(lines)


def worst_ratio(claim: Claim) -> tuple[Case, str, Ratio] | None:
    """The promised ratio nearest to its promise, or farthest below; without promises the least."""
    ratios = [
        (ratio.at_least is None, ratio.value / (ratio.at_least or 1), case, name, ratio)
        for case in claim.cases
        for name, ratio in case.ratios.items()
    ]
    if not ratios:
        return None
    *_, case, name, ratio = min(ratios, key=lambda one: one[:2])
    return case, name, ratio


def readme_text(report: Report) -> str:
    """The README's text between the markers: the machine, and the time of a call."""
    parts = [machine_line(dict(report.machine))]
    if (main_claim := _claim(report, MAIN_CLAIM)) is not None:
        parts = [
            "Microseconds for one call, from tensors to tensors; the median. "
            f"{parts[0]} *Gain*: {BASELINE} divided by {OURS}, round by round.",
            times_table(main_claim),
        ]
    return "\n\n".join(parts)


def page_text(report: Report, folder: str, stem: str) -> str:
    """The measurements page's text between the markers: claims, fused calls, peers.

    Args:
        report: the measurements.
        folder: the report's folder, as seen from the page.
        stem: the stem of the report's file and of its plots.
    """
    parts = [
        f"{machine_line(dict(report.machine))} [All figures]({folder}/{stem}.json).",
        "## Claims",
        claims_table(report, folder, stem),
    ]
    if (fusion := _claim(report, FUSION_CLAIM)) is not None:
        parts += [
            "## Fused",
            "How long a fused call takes, and how many times as fast as unfused and as the "
            "quickest peer that is, with the 99 % interval.",
            fused_table(fusion),
        ]
    if (main_claim := _claim(report, MAIN_CLAIM)) is not None:
        parts += [
            "## Peers",
            "How many times as fast as each peer a replay is, with the 99 % interval; below 1 the "
            "peer is faster.",
            peers_table(main_claim),
        ]
    return "\n\n".join(parts)


def _claim(report: Report, name: str) -> Claim | None:
    return next((one for one in report.claims if one.name == name), None)


def print_report(console: Console, report: Report) -> None:
    """Every ratio, for the terminal."""
    table = Table(title="times as fast or small as", title_justify="left")
    for heading in ("claim", "case", "against"):
        table.add_column(heading, overflow="fold")
    for heading in ("ratio", "99 % interval", "promised"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met")
    for claim in report.claims:
        for case in claim.cases:
            table.add_section()
            for row in _rows(case):
                table.add_row(claim.name, case.title, *row)
    console.print(table)


def _rows(case: Case) -> Iterator[tuple[str, ...]]:
    for name, ratio in case.ratios.items():
        promised = "" if ratio.at_least is None else f"{ratio.at_least:g}"
        met = _VERDICTS[ratio.met].strip("*") if promised else ""
        yield name, _number(ratio.value), _range(ratio), promised, met
    for name, why in case.absent.items():
        yield name, "absent", "", "", why


@click.command(help=__doc__)
@click.argument(
    "report_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=ROOT / "docs" / "measurements" / "cpu.json",
)
@click.option(
    "--readme",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=ROOT / "README.md",
    help="The page for the table of times, with the markers.",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=ROOT / "docs" / "measurements.md",
    help="The page for claims and peers, with the markers.",
)
def main(report_file: Path, readme: Path, page: Path) -> None:
    """Plots beside the report, tables into both pages, all ratios on the terminal."""
    try:
        report = read_report(report_file)
        folder = report_file.resolve().parent.relative_to(page.resolve().parent).as_posix()
        texts = {readme: readme_text(report), page: page_text(report, folder, report_file.stem)}
        pages = {
            path: insert(path.read_text(encoding="utf-8"), text) for path, text in texts.items()
        }
    except (ReportError, MarkersMissing) as error:
        raise click.ClickException(str(error)) from error
    console = Console()
    print_report(console, report)
    for claim in report.claims:
        path = report_file.with_name(f"{report_file.stem}_{claim.name}.svg")
        plot_claim(claim, path)
        console.print(f"wrote {path.name}")
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
        console.print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
