"""Launches timed on a device before weights are planned: the basis of plans, and refusals."""

from __future__ import annotations

import gc

import pytest
import torch
from device_streaming import GIVEN, check, expected_of

import offload
from offload.backends import TimedLaunches
from offload.load.place import place


@pytest.fixture
def timed(device, monkeypatch):
    """The plans under which launches were timed; durations are 1, 2, 3 and so on us."""
    found = []

    def times(_, prepared, plan):
        found.append(plan)
        n_launches = len(prepared.program.launches)
        return TimedLaunches(tuple(1e3 * (1 + index) for index in range(n_launches)), "counted")

    monkeypatch.setattr(type(device.backend.timing), "time_launches", times)
    return found


@pytest.fixture
def measure(device):
    """The backend's own role; other tests use made-up durations."""
    return super(type(device.backend), device.backend).timing


def test_plans_are_made_with_times_that_were_measured(device, deep, least_budget, timed):
    n_launches = len(deep.program.launches)
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        assert run.streaming.plan.compute_ns == 1e3 * n_launches * (n_launches + 1) / 2
        assert "were measured, on made-up inputs: counted" in run.streaming.explain()
    with deep.load(device.backend.name) as run:  # all weights stay resident: not needed
        assert run.streaming.plan.is_resident
    assert [plan.streaming for plan in timed] == [None]


@pytest.mark.slow
def test_times_of_the_device_make_a_plan_whose_results_are_right(
    device, deep, least_budget, measure, monkeypatch
):
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = expected_of(deep, inputs)
    monkeypatch.setattr(type(device.backend), "timing", measure)
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        assert "times of launches were measured, on made-up inputs: " in run.streaming.explain()
        check(run, inputs, expected, device.settle)


def test_each_launch_has_a_time_and_nothing_is_left(device, deep, measure):
    prepared = device.backend.prepare(deep.bound)
    plan = place(prepared, device.backend)
    gc.collect()  # memory of captures
    held = device.held()
    timed = measure.time_launches(prepared, plan)
    assert len(timed.times_ns) == len(prepared.program.launches)
    assert min(timed.times_ns) > 0
    gc.collect()
    assert device.held() == held


def test_without_the_proof_nothing_is_timed(device, deep, least_budget, timed):
    with deep.load(device.backend.name, weights_budget=least_budget, verify=False) as run:
        assert "estimates from their bytes: load(verify=False) exec" in run.streaming.explain()
    assert timed == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (offload.OutOfMemory, "there is no memory to time launches with: none here"),
        (offload.BackendUnavailable, "launches could not be timed: none here"),
        (offload.CaptureError, "launches could not be timed: none here"),
    ],
)
def test_where_launches_cannot_be_timed_times_are_estimates(
    error, says, device, deep, least_budget, monkeypatch
):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given])

    def refuse(*_):
        raise error("none here")

    monkeypatch.setattr(type(device.backend.timing), "time_launches", refuse)
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        assert f"estimates from their bytes: {says}" in run.streaming.explain()
        check(run, [given], expected, device.settle)


def test_a_device_that_fails_while_launches_are_timed_fails_the_load(
    device, deep, least_budget, monkeypatch
):
    def fail(*_):
        raise offload.ExecutionError("gone")

    monkeypatch.setattr(type(device.backend.timing), "time_launches", fail)
    with pytest.raises(offload.ExecutionError, match="gone"):
        deep.load(device.backend.name, weights_budget=least_budget)
