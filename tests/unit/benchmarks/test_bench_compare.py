"""bench/compare.py separates known changes from known noise."""

from __future__ import annotations

import numpy as np
import pytest
import reports
from click.testing import CliRunner

import compare
import measurements

N_PAIRS = 20


def verdicts(true_old, true_new, seed, **noise):
    rng = np.random.default_rng(seed)
    return [
        compare.verdict_of(
            reports.timed(true_old, rng, **noise), reports.timed(true_new, rng, **noise)
        )
        for _ in range(N_PAIRS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.01, 0.2, 0.5])
@pytest.mark.parametrize("true_ratio", [0.4, 1, 30])
def test_noise_is_noise(noise, true_ratio):
    assert set(verdicts(true_ratio, true_ratio, 1, noise=noise)) == {"within noise"}


def test_disturbed_rounds_are_noise():
    assert set(verdicts(2, 2, 2, disturbed=0.3)) == {"within noise"}


def test_changes_are_told():
    assert set(verdicts(2, 3, 3, noise=0.1)) == {"faster"}
    assert set(verdicts(3, 2, 4, noise=0.1)) == {"slower"}
    assert set(verdicts(3, 2, 4, noise=0.1, disturbed=0.3)) == {"slower"}


def test_what_is_below_the_tolerance_is_not_told():
    old, new = measurements.Ratio(2, 1.99, 2.01), measurements.Ratio(1.7, 1.69, 1.71)
    assert compare.verdict_of(old, new) == "within noise"
    assert compare.verdict_of(old, new, tolerance=0.1) == "slower"
    assert compare.verdict_of(new, old, tolerance=0.1) == "faster"


def test_intervals_that_meet_are_noise():
    old, new = measurements.Ratio(2, 1.5, 2.1), measurements.Ratio(1.6, 1.2, 1.5)
    assert compare.verdict_of(old, new) == "within noise"
    apart = measurements.Ratio(1.3, 1.2, 1.49)
    assert compare.verdict_of(old, apart) == "slower"


def test_what_is_counted_has_no_noise():
    old = measurements.counted_ratio(100, 50)
    assert compare.verdict_of(old, measurements.counted_ratio(100, 51)) == "larger"
    assert compare.verdict_of(old, measurements.counted_ratio(100, 49)) == "smaller"
    assert compare.verdict_of(old, measurements.counted_ratio(100, 50)) == "within noise"


@pytest.fixture
def two_reports(tmp_path):
    """Writes the old and the new report, of one claim each, from their cases."""

    def write(old, new):
        return [
            str(reports.write_report(tmp_path / f"{name}.json", {"replay": ("A claim.", cases)}))
            for name, cases in (("old", old), ("new", new))
        ]

    return write


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(compare.main, arguments)


def test_exit_status_tells_slower(two_reports):
    rng = np.random.default_rng(5)
    quick = reports.case(ratios={"eager": reports.timed(3, rng), "OpenVINO": reports.timed(1, rng)})
    slow = reports.case(ratios={"eager": reports.timed(2, rng), "OpenVINO": reports.timed(1, rng)})
    old, new = two_reports([quick], [slow])
    worse, better, same = run(old, new), run(new, old), run(old, old)
    assert (worse.exit_code, better.exit_code, same.exit_code) == (1, 0, 0)
    assert "slower" in worse.output
    assert "1 of 2 slower or larger" in worse.output
    assert "faster" in better.output
    assert "0 of 2 slower or larger" in same.output
    assert run(old, new, "--tolerance", "9").exit_code == 0


def test_what_one_report_lacks_is_listed_with_the_reason(two_reports):
    rng = np.random.default_rng(6)
    ratio = reports.timed(2, rng)
    full = reports.case(ratios={"eager": ratio, "OpenVINO": ratio})
    lacking = reports.case(ratios={"eager": ratio}, absent={"OpenVINO": "ImportError: openvino"})
    outcome = run(*two_reports([full], [lacking]))
    assert outcome.exit_code == 0
    assert "only in old: ImportError: openvino" in outcome.output
    outcome = run(*two_reports([lacking], [full]))
    assert "only in new: ImportError: openvino" in outcome.output


def test_nothing_in_common_is_an_error(two_reports):
    ratio = measurements.counted_ratio(2, 1)
    old, new = two_reports(
        [reports.case("one", ratios={"a": ratio})], [reports.case("other", ratios={"a": ratio})]
    )
    outcome = run(old, new)
    assert outcome.exit_code == 2
    assert "no ratio in common" in outcome.output


def test_folders_are_read_as_one_report(tmp_path):
    rng = np.random.default_rng(7)
    for folder, true_ratio in (("old", 3), ("new", 2)):
        (tmp_path / folder).mkdir()
        for name in ("replay", "loading"):
            ratio = reports.timed(true_ratio if name == "loading" else 1, rng, noise=0.05)
            claims = {name: ("A claim.", [reports.case(ratios={"eager": ratio})])}
            reports.write_report(tmp_path / folder / f"{name}.json", claims)
    outcome = run(str(tmp_path / "old"), str(tmp_path / "new"))
    assert outcome.exit_code == 1
    assert "1 of 2 slower or larger" in outcome.output


def test_several_runs_in_a_folder_count_together(tmp_path):
    """Each run has a separate error, which the intervals of its rounds do not include."""
    rng = np.random.default_rng(8)
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        for number, error in enumerate((0.85, 1, 1.15)):
            ratio = reports.timed(2 * error, rng, noise=0.02)
            claims = {"replay": ("A claim.", [reports.case(ratios={"eager": ratio})])}
            reports.write_report(tmp_path / folder / f"{number}.json", claims)
    one_run = str(tmp_path / "old" / "2.json"), str(tmp_path / "new" / "0.json")
    all_runs = str(tmp_path / "old"), str(tmp_path / "new")
    assert run(*one_run, "--tolerance", "0.05").exit_code == 1
    assert run(*all_runs, "--tolerance", "0.05").exit_code == 0


def test_machines_that_differ_are_named(tmp_path):
    claims = {
        "replay": ("A claim.", [reports.case(ratios={"a": measurements.counted_ratio(2, 1)})])
    }
    old = reports.write_report(tmp_path / "old.json", claims)
    new = reports.write_report(tmp_path / "new.json", claims, {**reports.MACHINE, "cores": 64})
    assert "not the same cores: 2" in run(str(old), str(new)).output


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"machine_info": {}, "benchmarks": []}'])
def test_what_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(measurements.ReportError):
        measurements.read_report(path)
    assert run(str(path), str(path)).exit_code == 2


def test_help_states_the_rule():
    outcome = run("--help")
    assert outcome.exit_code == 0
    assert "no value in common" in outcome.output
