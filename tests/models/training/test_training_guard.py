"""What each execution of a step compares, repairs or refuses; and changes that need neither."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import NormPair, adamw, adding_step, assert_alike, batch, captured_step, mlp

import offload

# ---- changes seen directly -----------------------------------------------------------------------


def test_parameters_and_buffers_that_are_written_in_place():
    pair = NormPair()
    other = mlp(nn.BatchNorm1d(16)).state_dict()
    for side in pair.sides:
        side.model.load_state_dict(other)
    pair.steps()
    with torch.no_grad():
        for side in pair.sides:
            for one in side.model.parameters():
                one.mul_(0.5)
    pair.steps()


def test_state_of_the_optimizer_that_is_written_in_place():
    pair = NormPair()
    for side in pair.sides:
        for items in side.optimizer.state.values():
            items["exp_avg"].zero_()
            items["step"].fill_(7)
    pair.steps()


def test_evaluation_and_averages_between_steps():
    pair = NormPair()
    x = torch.randn(4, 8)
    pair.ours.model.eval()
    with torch.no_grad():
        evaluated = offload.capture(pair.ours.model, x).load()
    for _ in range(3):
        pair.ours.model.train()
        pair.steps()
        pair.ours.model.eval()
        with torch.no_grad():
            expected = pair.eager.model.eval()(x)
            assert torch.equal(evaluated(x), expected)
        pair.eager.model.train()
    mean = torch.optim.swa_utils.AveragedModel(pair.ours.model)
    mean.update_parameters(pair.ours.model)
    assert torch.equal(mean.module[0].weight, pair.ours.model[0].weight)


def test_what_torch_counts_of_writes():
    pair = NormPair()
    weight = pair.ours.model[0].weight
    version = weight._version
    pair.steps(1)
    assert weight._version > version
    loss = F.mse_loss(pair.ours.model(batch()[0]), torch.zeros(4, 4))
    pair.steps(0)
    pair.run(*batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- gradients -----------------------------------------------------------------------------------


def test_gradients_that_are_made_in_the_step_may_be_anything_before():
    pair = NormPair()
    kept = [one.grad for one in pair.ours.model.parameters()]
    for side in pair.sides:
        side.optimizer.zero_grad()  # to None
    pair.steps()
    for side in pair.sides:
        for one in side.model.parameters():
            one.grad = torch.full_like(one, 3.0)
    pair.steps()
    now = [one.grad for one in pair.ours.model.parameters()]
    assert all(one is other for one, other in zip(kept, now, strict=True))


def test_gradients_that_the_step_adds_to():
    pair = NormPair(adding_step)
    for side in pair.sides:
        side.optimizer.zero_grad()  # to None: as zeros
    pair.steps()
    for side in pair.sides:
        side.optimizer.zero_grad(set_to_none=False)
    pair.steps()
    for side in pair.sides:
        for one in side.model.parameters():
            one.grad.fill_(0.25)
    pair.steps()
    weight = pair.ours.model[3].weight
    weight.grad = torch.zeros_like(weight)
    pair.refused(r"the gradient of model\.3\.weight: expected the tensor that .* got another")
    weight.grad = None
    pair.ours.optimizer.zero_grad()
    pair.eager.optimizer.zero_grad()
    pair.steps()


def test_gradients_where_the_step_had_none():
    def make_step(model, optimizer):
        step = adding_step(model, optimizer)

        def and_drop(x, target):
            loss = step(x, target)
            optimizer.zero_grad()
            return loss

        return and_drop

    pair = NormPair(make_step)
    weight = pair.ours.model[0].weight
    weight.grad = torch.ones_like(weight)
    pair.refused(r"the gradient of step\.model\.0\.weight: expected None")
    pair.ours.optimizer.zero_grad()
    pair.steps()


def test_a_parameter_that_is_frozen_later():
    pair = NormPair()
    weight = pair.ours.model[0].weight
    weight.requires_grad_(False)
    pair.refused(r"model\.0\.weight: expected a tensor that requires gradients")
    weight.requires_grad_()
    pair.steps()


def test_hooks_that_come_later():
    pair = NormPair()
    weight = pair.ours.model[0].weight
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        pair.refused(r"the gradient of model\.0\.weight has a hook")
        handle.remove()
        pair.steps(1)
    handle = pair.ours.optimizer.register_step_post_hook(lambda *_: None)
    pair.refused("optimizer has a hook")
    handle.remove()
    pair.steps()


def test_gradients_that_are_switched_off():
    pair = NormPair()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            pair.refused("gradients are switched off here")
    pair.steps()


# ---- models --------------------------------------------------------------------------------------


def test_a_mode_that_is_another():
    pair = NormPair()
    pair.ours.model[1].eval()
    pair.refused(r"\(BatchNorm1d\): expected training=True, .*model\.train\(\)")
    pair.ours.model.eval()
    pair.refused(r"expected training=True")
    pair.ours.model.train()
    pair.steps()


def test_a_storage_that_is_another():
    pair = NormPair()
    weight = pair.ours.model[0].weight
    weight.data = weight.data.clone()
    with pytest.raises(offload.BindingError, match=r"its storage was swapped.*rebind_weights"):
        pair.run(*batch())
    pair.run.rebind_weights()
    pair.steps()


@pytest.mark.parametrize("assigns", [False, True])
def test_parameters_and_buffers_that_are_replaced(assigns):
    pair = NormPair()
    model = pair.ours.model
    if assigns:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        pair.refused(r"weight, bias of a Linear: .*load_state_dict\(assign=True\)")
    else:
        mean = model[1].running_mean
        model[1].running_mean = mean.clone()
        pair.refused("running_mean of a BatchNorm1d: expected the tensors of the recorded step")
        model[1].running_mean = mean
        pair.steps()


def test_a_scaler_that_is_set_otherwise():
    scalers = []

    def make_step(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scalers.append(scaler)

        def step(x, target):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step

    pair = NormPair(make_step, lambda given: torch.optim.AdamW(given, fused=True))
    scalers[0].set_growth_factor(4.0)
    pair.refused(r"scaler\._growth_factor: expected 2\.0, .* got 4\.0")
    scalers[0].set_growth_factor(2.0)
    for one in scalers:
        one.update(2.0)
    pair.steps()


# ---- beside other steps --------------------------------------------------------------------------


def test_steps_in_eager_and_captures_of_other_shapes_between():
    pair = NormPair()
    small = torch.randn(2, 8), torch.randn(2, 4)
    assert torch.equal(pair.ours.step(*small), pair.eager.step(*small))
    pair.steps()
    other = captured_step(pair.ours.step, *small).load()
    pair.eager.step(*small)
    for _ in range(3):
        pair.steps()
        assert torch.equal(other(*small), pair.eager.step(*small))
        assert_alike(pair.ours, pair.eager)


def test_a_step_is_recorded_while_another_executable_watches_steps():
    """Under a budget executables check the memory of everything that optimizers step."""
    other = nn.Linear(64, 64)
    with torch.no_grad():
        captured = offload.capture(other, torch.randn(2, 64))
    with captured.load(weights_budget="1MiB"):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = offload.capture(step, torch.randn(3, 4), training=True).load()
        before = model.weight.detach().clone()
        run(torch.randn(3, 4))
        assert not torch.equal(model.weight, before)


def test_accumulation_over_executions():
    """One step adds to gradients, another one applies them."""

    def adds(model):
        def add(x, target):
            loss = F.mse_loss(model(x), target)
            loss.backward()
            return loss.detach()

        return add

    model = mlp(nn.BatchNorm1d(16))
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    eager = adds(twin)
    given = [batch() for _ in range(4)]
    add = captured_step(adds(model), *given[0]).load()
    eager(*given[0])

    def update(optimizer):
        def step():
            optimizer.step()
            optimizer.zero_grad()

        return step

    for _ in range(3):
        for one in given:
            assert torch.equal(add(*one), eager(*one))
        update(optimizer)()
        update(other)()
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, same)


def test_what_is_told_of_executions_is_guarded_too(monkeypatch, capsys):
    monkeypatch.setenv("OFFLOAD_DEBUG", "3")
    pair = NormPair()
    pair.ours.model.eval()
    pair.refused("expected training=True")
    assert "execution 2:" in capsys.readouterr().err


def test_a_scaler_that_is_disabled_is_used_as_eager_does():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    twin = copy.deepcopy(model)

    def step_of(one):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)

        def step(x):
            optimizer.zero_grad()
            loss = one(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step, scaler

    eager, _ = step_of(twin)
    step, scaler = step_of(model)
    batches = torch.randn(4, 3, 8)
    captured = offload.capture(step, batches[0], training=True)
    assert torch.equal(captured.recorded_result, eager(batches[0]))
    run = captured.load()
    for x in batches[1:]:
        assert torch.equal(run(x), eager(x))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    scaler._enabled = True
    with pytest.raises(offload.BindingError, match="_enabled"):
        run(batches[0])
