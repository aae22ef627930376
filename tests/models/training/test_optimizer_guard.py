"""Changes of an optimizer between executions of a step: used as they are, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training import NormPair, adamw, mse_step


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("lr", 0.5, r"expected 0\.001, .* got 0\.5.*fused=True and a tensor"),
        ("betas", (0.8, 0.999), r"expected \(0\.9, 0\.999\), .* got \(0\.8, 0\.999\)"),
        ("weight_decay", 0.0, r"expected 0\.01, .* got 0\.0: capture the step again$"),
        ("eps", 1e-6, r"expected 1e-08, .* got 1e-06: capture the step again$"),
        ("amsgrad", True, "expected False, .* got True"),
        ("lr", torch.tensor(0.001), r"expected 0\.001, .* got a tensor"),
    ],
)
def test_a_hyperparameter_that_is_another(key, value, shown):
    pair = NormPair()
    (group,) = pair.ours.optimizer.param_groups
    before = group[key]
    group[key] = value
    pair.refused(rf"optimizer\.param_groups\[0\]\['{key}'\]: {shown}")
    group[key] = copy.copy(before)  # equality is enough
    pair.steps()


def test_a_scheduler_of_a_number_is_noticed():
    schedulers = []

    def make_step(model, optimizer):
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1))
        return mse_step(model, optimizer)

    pair = NormPair(make_step)
    schedulers[0].step()
    pair.refused(r"\['lr'\]: expected 0\.001")


def test_groups_and_parameters_that_are_others():
    pair = NormPair()
    (group,) = pair.ours.optimizer.param_groups
    taken = group["params"].pop()
    pair.refused(r"\['params'\]: other parameters")
    group["params"].append(taken)
    pair.steps()
    pair.ours.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    pair.refused("expected 1 groups of parameters, .* got 2")


@pytest.mark.parametrize(
    "optimizer",
    [adamw, lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), fused=True)],
)
def test_a_state_that_is_loaded(optimizer):
    pair = NormPair(optimizer=optimizer)
    states = [copy.deepcopy(side.optimizer.state_dict()) for side in pair.sides]
    models = [copy.deepcopy(side.model.state_dict()) for side in pair.sides]
    pair.steps(3)
    for side, state, model in zip(pair.sides, states, models, strict=True):
        side.optimizer.load_state_dict(state)
        side.model.load_state_dict(model)
    pair.steps(3)
    again = copy.deepcopy(pair.ours.optimizer.state_dict())
    assert again["state"][0]["step"] == 6


def test_a_state_that_does_not_fit():
    pair = NormPair()
    weight = pair.ours.model[0].weight
    items = pair.ours.optimizer.state[weight]
    kept = items["exp_avg"]
    items["exp_avg"] = torch.zeros(3)
    pair.refused(r"exp_avg of model\.0\.weight .*expected a tensor of shape \[16, 8\]")
    items["exp_avg"] = kept
    items["more"] = torch.zeros(3)
    pair.refused("got more, which the recorded step did not have")
    del items["more"]
    pair.steps()
    pair.ours.optimizer.state.clear()
    pair.refused(r"of model\.0\.weight .* got none")


def test_a_group_with_another_learning_rate_is_refused_when_it_is_loaded():
    pair = NormPair()
    state = copy.deepcopy(pair.ours.optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.2
    pair.ours.optimizer.load_state_dict(state)
    pair.refused(r"\['lr'\]: expected 0\.001, .* got 0\.2")
