"""bench/publish.py puts exactly the content of a report into its two pages and the plots."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import reports
from click.testing import CliRunner

import measurements
import publish

PAGE = f"# title\n\nbefore\n\n{publish.BEGIN}\nold\n{publish.END}\n\nafter\n"


def ratio(value, at_least=None, spread=0.1):
    return measurements.Ratio(value, value - spread, value + spread, "time", at_least)


def curve(*values):
    figures = tuple(measurements.figure_of([value] * 5, "ns") for value in values)
    return measurements.Curve("launches", tuple(4.0**n for n in range(len(values))), figures)


def time(value, unit="ns"):
    return measurements.figure_of([value] * 5, unit)


LOOP = {"C++ loop": ratio(0.9)}
TIMES = {"offload": time(38_326), "eager": time(207_211), "OpenVINO": time(27.8855, "us")}
CLAIMS = {
    "replay": (
        "Replays are quick.",
        [
            reports.case(
                "small",
                ratios={"eager": ratio(6.5, 1), "OpenVINO": ratio(0.5), **LOOP},
                figures={**TIMES, "C++ loop": time(1)},
            ),
            reports.case(
                "large",
                ratios={"eager": ratio(1.5, 1)},
                figures={"offload": time(7.6, "ms"), "eager": time(11_400_000)},
                absent={"OpenVINO": "ImportError: none"},
            ),
        ],
    ),
    "header": (
        "Headers are short.",
        [reports.case("chain", ratios={"short": ratio(0.6, 0.8)}, curves={"all": curve(1, 2, 3)})],
    ),
    "planner": (
        "Arenas are small.",
        [reports.case("A", ratios={"bound": measurements.counted_ratio(99, 100, at_least=0.98)})],
    ),
    "fusion": (
        "Kernels are quick.",
        [
            reports.case(
                "stack",
                ratios={"the quickest peer, OpenVINO": ratio(1.2, 1), "offload": ratio(4.5, 1)},
                figures={"offload, fused": time(3.71, "us"), "offload": time(22.7, "us")},
            )
        ],
    ),
    "open": ("Perhaps.", [reports.case("B", ratios={"eager": ratio(1.05, 1)})]),
    "silent": ("No promise.", [reports.case("C", ratios={"eager": ratio(2)})]),
}


@dataclasses.dataclass(frozen=True)
class Files:
    """A report and the two pages that show it."""

    report: Path
    readme: Path
    page: Path

    def run(self):
        options = ["--readme", str(self.readme), "--page", str(self.page)]
        return CliRunner(env={"COLUMNS": "200"}).invoke(publish.main, [str(self.report), *options])


def write_files(folder):
    docs = folder / "docs"
    (docs / "figures").mkdir(parents=True)
    files = Files(docs / "figures" / "cpu.json", folder / "README.md", docs / "measurements.md")
    files.readme.write_text(PAGE)
    files.page.write_text(PAGE)
    reports.write_report(files.report, CLAIMS)
    return files


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The report and the pages after publication; tests only read them."""
    files = write_files(tmp_path_factory.mktemp("published"))
    outcome = files.run()
    assert outcome.exit_code == 0, outcome.output
    return files


@pytest.mark.slow
def test_the_readme_has_one_table_of_times(published):
    readme = published.readme.read_text()
    assert "| model | eager | **offload** | gain | OpenVINO |" in readme
    assert "| small | 207 | **38.3** | 6.5 × | 27.9 |" in readme
    assert "| large | 11,400 | **7,600** | 1.5 × | – |" in readme
    assert len(re.findall(r"^\|---", readme, re.MULTILINE)) == 1
    assert "Test Processor" in readme
    assert "promised" not in readme


def test_tables_hold_the_ratios(published):
    page = published.page.read_text()
    assert "| model | eager | OpenVINO |" in page
    assert "| small | 6.5 (6.4–6.6) | 0.50 (0.40–0.60) |" in page
    assert "| large | 1.5 (1.4–1.6) | – |" in page
    assert "small, C++ loop: 0.90 (0.80–1.0)." in page
    assert "Absent: OpenVINO for large: ImportError: none." in page
    assert "Test Processor" in page
    assert "torch 2.13.0" in page


def test_fused_calls_have_a_table(published):
    page = published.page.read_text()
    assert "| stack | 3.71 | 4.5 (4.4–4.6) | 1.2 (1.1–1.3) | OpenVINO |" in page


def test_promises_are_judged(published):
    page = published.page.read_text()
    verdicts = {
        claim: line.rsplit("|", 2)[1].strip()
        for claim in ("Replays", "Headers", "Arenas", "Perhaps", "No promise")
        for line in page.splitlines()
        if line.startswith(f"| {claim}")
    }
    assert verdicts == {
        "Replays": "yes",
        "Headers": "**no**",
        "Arenas": "yes",
        "Perhaps": "not decided",
        "No promise": "–",
    }
    assert "0.60 (0.50–0.70), promised 0.8: chain; short" in page
    assert "0.99, promised 0.98: A; bound" in page
    assert "2.0 (1.9–2.1), nothing promised here: C; eager" in page


@pytest.mark.slow
def test_the_rest_of_a_page_stays_and_writing_again_changes_nothing(published):
    for path in (published.readme, published.page):
        text = path.read_text()
        assert text.startswith("# title\n\nbefore\n\n")
        assert text.endswith("\n\nafter\n")
        assert "\nold\n" not in text
    written = [*published.report.parent.glob("*.svg"), published.readme, published.page]
    before = {path: path.read_bytes() for path in written}
    published.run()
    assert {path: path.read_bytes() for path in written} == before


def test_each_claim_has_a_plot_with_its_words(published):
    page = published.page.read_text()
    for name, (text, cases) in CLAIMS.items():
        path = published.report.with_name(f"cpu_{name}.svg")
        words = "".join(ElementTree.parse(path).getroot().itertext())
        assert text in words
        assert f"](figures/{path.name})" in page
        for case in cases:
            labels = case.curves if any(one.curves for one in cases) else case.ratios
            assert all(label in words for label in labels)


def test_ratios_stand_in_the_plot(published):
    words = "".join(
        ElementTree.parse(published.report.with_name("cpu_replay.svg")).getroot().itertext()
    )
    assert {"6.5", "0.5", "1.5"} <= set(re.findall(r"[\d.]+", words))


def test_no_links_lead_nowhere(published):
    for path in (published.readme, published.page):
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / link).exists()


@pytest.mark.parametrize("which", ["readme", "page"])
@pytest.mark.parametrize(
    "page",
    [
        "no markers",
        publish.BEGIN,
        publish.END + publish.BEGIN,
        PAGE + publish.BEGIN,
        PAGE + publish.END,
        PAGE + PAGE,
    ],
)
def test_a_page_without_its_markers_is_left_alone(files, which, page):
    getattr(files, which).write_text(page)
    outcome = files.run()
    assert outcome.exit_code == 1
    assert "expected once each" in outcome.output
    for name in ("readme", "page"):
        assert getattr(files, name).read_text() == (page if name == which else PAGE)
    assert not list(files.report.parent.glob("*.svg"))


def test_the_projects_pages_have_their_markers_and_the_report_its_plots():
    docs = publish.ROOT / "docs"
    report = measurements.read_report(docs / "measurements" / "cpu.json")
    claims = publish.page_text(report, "measurements", "cpu")
    for path, text in (
        (publish.ROOT / "README.md", publish.readme_text(report)),
        (docs / "measurements.md", claims),
    ):
        page = path.read_text()
        assert publish.insert(page, text) == page, "run: python bench/publish.py"
    for link in re.findall(r"\]\((measurements/[^)]+)\)", claims):
        assert (docs / link).is_file()
