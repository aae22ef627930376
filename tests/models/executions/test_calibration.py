"""Calibration measures once, stores the result, and measures again when it no longer holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import offload
from offload.backends import find_backend
from offload.costs import HeaderModel, fit, load_cost_model, save_cost_model
from offload.observe import calibration
from offload.run.forecast import cost_key
from offload.timeline import Scheduling, SpanKind


@pytest.fixture
def few_executions(monkeypatch):
    monkeypatch.setattr(calibration, "_N_ROUNDS", 1)
    monkeypatch.setattr(calibration, "_N_CHECKS", 60)
    monkeypatch.setattr(calibration, "_PROBES", calibration._PROBES[:2])


@pytest.fixture
def fits(monkeypatch):
    """Counts fits, without changing them."""
    made: list[HeaderModel] = []
    original = fit.fit_header_model

    def counted(observations):
        made.append(original(observations, n_resamples=2))
        return made[-1]

    monkeypatch.setattr(fit, "fit_header_model", counted)
    return made


@pytest.mark.slow
def test_kept_while_it_holds_and_fitted_anew_when_it_drifted(
    tmp_path, monkeypatch, few_executions, fits
):
    monkeypatch.setattr(calibration, "DRIFT", float("inf"))
    generator = torch.get_rng_state()
    first = offload.calibrate(folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), generator)
    assert len(fits) == 1
    n_mixed = len(first.header.held_out_ratios) - len(fits[0].held_out_ratios)
    assert n_mixed == sum(calibration._MIXED_STEPS)
    assert len(fits[0].held_out_ratios) == len(calibration._FITTED)
    known = dataclasses.replace(first, launch_ns={"aten::sin(float32[4])": 5.0})
    save_cost_model(known, cost_key(find_backend("cpu").machine()), tmp_path)
    assert offload.calibrate(folder=tmp_path) == known
    assert len(fits) == 1
    monkeypatch.setattr(calibration, "DRIFT", -1.0)  # any measurement then counts as drift
    again = offload.calibrate(folder=tmp_path)
    assert len(fits) == 2
    assert again.launch_ns == known.launch_ns
    assert load_cost_model(cost_key(find_backend("cpu").machine()), tmp_path) == again
    offload.calibrate(folder=tmp_path, refit=True)
    assert len(fits) == 3


def test_observations_have_the_shape_that_was_executed():
    observed = list(calibration._observe([(3, 2, 4)], "cpu", 40))
    shapes = [dataclasses.astuple(one.shape)[:6] for one in observed]
    n = len(observed) // 4
    assert n == 40 - calibration._N_WARM_UP
    assert shapes[0] == (3, 0, 2, 4, 0, 0)  # nothing moved
    assert shapes[n] == (3, 0, 2, 4, 5, 5)  # inputs and buffers moved
    assert all(one[:4] == (3, 2, 0, 4) for one in shapes[2 * n :])
    assert all(one.m_l_t_ns > 0 for one in observed)


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_timelines_hold_predictions_beside_measurements(tmp_path, few_executions, fits, scheduling):
    costs = offload.calibrate(folder=tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
    with offload.capture(model) as captured:
        model(torch.ones(2, 8))
    run = captured.load(scheduling=scheduling)
    run(torch.ones(2, 8))
    with run.timeline(costs) as timeline:
        run(torch.ones(2, 8))
        run(torch.ones(2, 8))
    for execution in timeline.executions:
        predicted = execution.predicted
        stages = [span.name for span in predicted if span.kind is SpanKind.STAGE]
        assert stages == ["convert", "policy", "patch", "submit"]
        for kind in (SpanKind.LAUNCH, SpanKind.ISSUE):
            measured = [(span.launch, span.name, span.lane) for span in execution.of_kind(kind)]
            assert [
                (span.launch, span.name, span.lane) for span in predicted if span.kind is kind
            ] == measured
        assert predicted[0].begin_ns == execution.begin_ns
        assert execution.predicted_m_l_t_ns > 0
    known = costs.learned(run.program, timeline.executions)
    assert len(known.launch_ns) == 2
