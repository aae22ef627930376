"""bench/publish.py puts what a report holds, and nothing else, into the README and the plots."""

from __future__ import annotations

import re
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


LOOP = {"C++ loop": ratio(0.9)}
CLAIMS = {
    "replay": (
        "Replays are quick.",
        [
            reports.case(
                "small",
                ratios={"eager": ratio(6.5, 1), "OpenVINO": ratio(0.5), **LOOP},
            ),
            reports.case(
                "large", ratios={"eager": ratio(1.5, 1)}, absent={"OpenVINO": "ImportError: none"}
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
    "open": ("Perhaps.", [reports.case("B", ratios={"eager": ratio(1.05, 1)})]),
    "silent": ("No promise.", [reports.case("C", ratios={"eager": ratio(2)})]),
}


def write_files(folder):
    (folder / "docs").mkdir()
    readme = folder / "README.md"
    readme.write_text(PAGE)
    return reports.write_report(folder / "docs" / "cpu.json", CLAIMS), readme


def run(report, readme):
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        publish.main, [str(report), "--readme", str(readme)]
    )


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The report and the page, once published; tests only read them."""
    report, readme = write_files(tmp_path_factory.mktemp("published"))
    outcome = run(report, readme)
    assert outcome.exit_code == 0, outcome.output
    return report, readme


def test_tables_hold_the_ratios(published):
    page = published[1].read_text()
    assert "| model | eager | OpenVINO |" in page
    assert "| small | 6.5 (6.4–6.6) | 0.50 (0.40–0.60) |" in page
    assert "| large | 1.5 (1.4–1.6) | – |" in page
    assert "small, C++ loop: 0.90 (0.80–1.0)." in page
    assert "Absent: OpenVINO for large: ImportError: none." in page
    assert "Test Processor" in page
    assert "torch 2.13.0" in page


def test_promises_are_judged(published):
    page = published[1].read_text()
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


def test_the_rest_of_the_page_stays_and_writing_again_changes_nothing(published):
    page = published[1].read_text()
    assert page.startswith("# title\n\nbefore\n\n")
    assert page.endswith("\n\nafter\n")
    assert "\nold\n" not in page
    pictures = {path: path.read_bytes() for path in published[0].parent.glob("*.svg")}
    run(*published)
    assert published[1].read_text() == page
    assert pictures == {path: path.read_bytes() for path in published[0].parent.glob("*.svg")}


def test_each_claim_has_a_plot_with_its_words(published):
    page = published[1].read_text()
    for name, (text, cases) in CLAIMS.items():
        path = published[0].with_name(f"cpu_{name}.svg")
        words = "".join(ElementTree.parse(path).getroot().itertext())
        assert text in words
        assert f"](docs/{path.name})" in page
        for case in cases:
            labels = case.curves if any(one.curves for one in cases) else case.ratios
            assert all(label in words for label in labels)


def test_ratios_stand_in_the_plot(published):
    words = "".join(
        ElementTree.parse(published[0].with_name("cpu_replay.svg")).getroot().itertext()
    )
    assert {"6.5", "0.5", "1.5"} <= set(re.findall(r"[\d.]+", words))


def test_no_links_lead_nowhere(published):
    for link in re.findall(r"\]\(([^)]+)\)", published[1].read_text()):
        assert (published[1].parent / link).exists()


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
def test_a_page_without_its_markers_is_left_alone(files, page):
    files[1].write_text(page)
    outcome = run(*files)
    assert outcome.exit_code == 1
    assert "expected once each" in outcome.output
    assert files[1].read_text() == page
    assert not list(files[0].parent.glob("*.svg"))


def test_the_projects_readme_has_its_markers_and_the_report_its_plots():
    page = (publish.ROOT / "README.md").read_text()
    report = publish.ROOT / "docs" / "measurements" / "cpu.json"
    text = publish.readme_text(measurements.read_report(report), "docs/measurements", "cpu")
    assert publish.insert(page, text) == page, "run: python bench/publish.py"
    for link in re.findall(r"\]\((docs/measurements/[^)]+)\)", text):
        assert (publish.ROOT / link).is_file()
