"""Learning rates that are arguments of a step, or tensors that it computes: with eager's bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import mse_loss
from training import Pair, check, mlp

import offload

OPTIMIZERS = {
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, fused=True),
    "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "Adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr, fused=True),
}


def batches():
    """Of different numbers of batches and rates, so that all pairs meet."""
    rates = [torch.tensor(0.1 / (1 + number)) for number in range(20)]
    return [(torch.randn(4, 8), torch.randn(4, 4), rate) for rate in rates]


def written(group, lr):
    group["lr"].copy_(lr)


def assigned(group, lr):
    group["lr"] = lr


def computed(group, lr):
    group["lr"] = (lr * 0.5).clamp(max=0.01)


def smoothed(group, lr):
    group["lr"].lerp_(lr, 0.25)


def step_that(sets):
    def make(model, optimizer):
        def step(x, target, lr):
            for group in optimizer.param_groups:
                sets(group, lr)
            optimizer.zero_grad()
            loss = mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return make


def optimizer_of(name, *, as_tensor=True):
    def make(parameters):
        first, *others = parameters
        groups = [{"params": [first]}, {"params": others}]
        return OPTIMIZERS[name](groups, torch.tensor(0.1) if as_tensor else 0.1)

    return make


CASES = [
    *(("Adam", sets) for sets in (written, assigned, computed, smoothed)),
    *((name, sets) for name in ("SGD", "AdamW", "Adagrad") for sets in (written, assigned)),
]


@pytest.mark.parametrize("n_before", [0, 2])
@pytest.mark.parametrize(("name", "sets"), CASES)
def test_a_rate_that_the_step_sets(name, sets, n_before):
    rates: dict[int, list[float]] = {}
    given = batches()

    def between(side, _):
        of_side = rates.setdefault(id(side), [])
        of_side += [float(one["lr"]) for one in side.optimizer.param_groups]

    optimizer = optimizer_of(name, as_tensor=sets in (written, smoothed))
    check(mlp(), optimizer, step_that(sets), given, between=between, n_before=n_before)
    ours, eager = rates.values()
    assert ours == eager
    assert len(set(eager)) > 10
    assert [float(rate) for *_, rate in given] == [float(one[2]) for one in batches()]


OTHERS = {
    "ASGD": lambda parameters, lr: torch.optim.ASGD(parameters, lr=lr, foreach=True),
    "RAdam": lambda parameters, lr: torch.optim.RAdam(parameters, lr=lr),
}


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_that_compute_with_the_rate_as_a_tensor(name):
    def optimizer(parameters):
        return OTHERS[name](parameters, torch.tensor(0.1))

    check(mlp(), optimizer, step_that(written), batches(), n_before=7)


def rates_of(pair):
    return [[float(one["lr"]) for one in side.optimizer.param_groups] for side in pair.sides]


@pytest.mark.parametrize("sets", [written, assigned])
def test_checkpoints_between_steps_that_set_the_rate(sets):
    given = iter(batches())
    pair = Pair(mlp(), lambda: next(given), step_that(sets), optimizer_of("AdamW"))
    saved = [copy.deepcopy(side.optimizer.state_dict()) for side in pair.sides]
    pair.steps()
    for side, state in zip(pair.sides, saved, strict=True):
        side.optimizer.load_state_dict(state)
    pair.steps()
    ours, eager = rates_of(pair)
    assert ours == eager
    for side in pair.sides:
        side.optimizer.param_groups[0]["weight_decay"] = 0.5
    pair.refused("weight_decay")


def test_the_argument_stays_the_callers():
    """Eager leaves the argument itself in the group; here executions write no argument."""
    model, rate = mlp(), torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)
    x, target, _ = batches()[0]
    step = step_that(assigned)(model, optimizer)
    step(x, target, rate)
    run = offload.capture(step, x, target, rate, training=True).load()
    run(x, target, torch.tensor(0.5))
    assert float(rate) == float(torch.tensor(0.1))
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


def refusal(sets, *, rate=None):
    model = mlp()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=torch.tensor(0.1) if rate is None else rate, fused=True
    )
    with pytest.raises(offload.CaptureError) as caught:
        offload.capture(step_that(sets)(model, optimizer), *batches()[0], training=True)
    return str(caught.value)


def test_rates_of_numbers_are_refused():
    def filled(group, _):
        group["lr"].fill_(0.05)

    def literal(group, _):
        group["lr"].copy_(torch.tensor(0.05))

    def decayed(group, _):
        group["lr"].mul_(0.9)

    def constant(group, _):
        group["lr"] = torch.tensor(0.05) * 2

    def read_before(group, lr):
        group["lr"] = group["lr"] * 0.5 + lr

    for sets in (filled, literal, decayed):
        message = refusal(sets)
        assert "writes optimizer.param_groups[0]['lr'] from numbers" in message
        assert "group['lr'].copy_(lr)" in message
    assert "changes optimizer.param_groups[0]['lr']" in refusal(constant)
    assert "reads optimizer.param_groups[0]['lr'] and puts another" in refusal(read_before)
