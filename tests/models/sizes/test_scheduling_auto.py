"""`scheduling="auto"` of a Family: by times, with the reason."""

from __future__ import annotations

import importlib

import pytest
import torch
from promoting import (
    Layers,
    N,
    captured_layers,
)

import offload


def test_scheduling_auto_is_chosen_by_times_and_says_so():
    captured = captured_layers()
    run = captured.load(sizes=offload.Sizes(), scheduling="auto")
    x = torch.randn(8, 16)
    assert torch.equal(run(x)[0], Layers().eval()(x)[0])
    assert run.last_execution.n_executions == 1
    how = "launch by launch" if run.scheduling.value == "host" else "as one task"
    assert f"scheduled {how}: at n = 12 an execution took" in run.explain()
    padded = captured.load(
        sizes=offload.Sizes(buckets={"n": [16]}, pad={"x": 0.0}), scheduling="auto"
    )
    assert "scheduled as one task: each choice of sizes is loaded by itself" in padded.explain()


@pytest.mark.parametrize("quicker", ["offload", "host"])
def test_scheduling_auto_takes_what_is_quicker(monkeypatch, quicker):
    choice = importlib.import_module("offload.host.scheduling_choice")
    times = {"offload": 2_000, "host": 3_000, quicker: 1_000}
    monkeypatch.setattr(
        choice,
        "taken_in_turns_ns",
        lambda what, *runs: [[times[one.scheduling.value]] * 3 for one in runs],
    )
    run = captured_layers().load(sizes=offload.Sizes(), scheduling="auto")
    assert run.scheduling.value == quicker
    assert run.explain().count("medians, made-up inputs") == 1


def test_what_a_trial_would_leave_is_not_tried():
    with torch.no_grad():
        captured = offload.capture(
            lambda x: torch.rand(x.shape[0]) + x[:, 0],
            torch.randn(12, 16),
            dynamic_shapes=({0: N},),
        )
    state = torch.get_rng_state()
    run = captured.load(sizes=offload.Sizes(), scheduling="auto")
    assert torch.equal(torch.get_rng_state(), state)
    assert "scheduled as one task, untried" in run.explain()
