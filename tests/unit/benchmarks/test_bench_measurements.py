"""What benchmarks record: ratios per round, intervals, reasons without folders."""

from __future__ import annotations

import numpy as np
import pytest
import reports

import measurements


def test_what_slows_a_whole_round_cancels():
    busy = np.array([1, 10, 1, 3, 1, 7, 1.0])
    ratio = measurements.ratio_of(list(6 * busy), list(2 * busy))
    assert (ratio.value, ratio.low, ratio.high) == (3, 3, 3)


@pytest.mark.parametrize("rounds", [3, 5, 9, 60])
def test_intervals_hold_the_true_median(rounds):
    rng = np.random.default_rng(1)
    ratios = [reports.timed(2, rng, rounds=rounds) for _ in range(100)]
    assert sum(one.low <= 2 <= one.high for one in ratios) >= 95
    assert all(one.low <= one.value <= one.high for one in ratios)


def test_the_same_rounds_give_the_same_interval():
    values = list(np.random.default_rng(2).random(30))
    assert measurements.median_interval(values) == measurements.median_interval(values)


def test_too_few_rounds_are_refused():
    with pytest.raises(ValueError, match="three rounds"):
        measurements.ratio_of([1, 2], [1, 2])
    with pytest.raises(ValueError, match="shorter"):
        measurements.ratio_of([1, 2, 3, 4], [1, 2, 3])
    with pytest.raises(ValueError, match="positive"):
        measurements.median_interval([0, 1, 2])


def test_peers_may_take_part_in_the_first_rounds_alone():
    ratio = measurements.ratio_of([2, 4, 6], [1, 2, 3, 100, 100])
    assert ratio.value == 2


def test_figures_have_quartiles():
    figure = measurements.figure_of([1, 2, 3, 4, 5], "ns")
    assert (figure.value, figure.q1, figure.q3, figure.n_rounds) == (3, 2, 4, 5)


@pytest.mark.parametrize(
    ("low", "high", "met"), [(1.1, 1.3, True), (0.7, 0.9, False), (0.9, 1.1, None), (1, 1, True)]
)
def test_promises(low, high, met):
    assert measurements.Ratio((low + high) / 2, low, high, "time", 1).met is met
    assert measurements.Ratio((low + high) / 2, low, high).met is None


def test_reports_come_back_as_written(tmp_path):
    figure = measurements.Figure(2.0, 1.5, 2.5, 1.0, 3.0, 9, "ns")
    case = reports.case(
        ratios={"eager": measurements.Ratio(2, 1.5, 2.5, "time", 1)},
        figures={"offload": figure},
        curves={"all": measurements.Curve("launches", (1.0, 2.0), (figure, figure))},
        absent={"OpenVINO": "ImportError: openvino"},
    )
    path = reports.write_report(tmp_path / "cpu.json", {"replay": ("A claim.", [case])})
    claim = measurements.Claim("replay", "A claim.", (case,))
    assert measurements.read_report(path) == measurements.Report(reports.MACHINE, (claim,))


def test_reasons_name_no_folders():
    error = OSError("cannot open /home/someone/.cache/engine/libengine.so.1: no such file\nmore")
    assert measurements.reason(error) == "OSError: cannot open libengine.so.1: no such file"
    assert measurements.reason(ValueError()) == "ValueError"
