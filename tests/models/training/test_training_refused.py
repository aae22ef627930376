"""Steps that would be silently wrong when executed again: refused when recorded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import batch, mlp, refusal

import offload


def step_with(between=lambda: None, *, model=None, optimizer=None):
    model = model or mlp()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        between()
        optimizer.step()
        return loss.detach()

    return step


# ---- found in the call ---------------------------------------------------------------------------


def test_a_scheduler_in_the_step_is_refused():
    for lr in (0.1, torch.tensor(0.1)):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        step = step_with(scheduler.step, model=model, optimizer=optimizer)
        with pytest.warns(UserWarning, match="lr_scheduler.step"):
            assert "steps a scheduler" in refusal(step)


def test_a_learning_rate_that_the_step_sets_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = torch.optim.SGD(mlp().parameters(), lr=torch.tensor(0.1), fused=True)

    def assigned():
        optimizer.param_groups[0]["lr"] = 0.05

    def written():
        rate.param_groups[0]["lr"].fill_(0.05)

    message = refusal(step_with(assigned, model=model, optimizer=optimizer))
    assert "changes optimizer.param_groups[0]['lr']" in message
    assert "writes between.rate.param_groups[0]['lr']" in refusal(step_with(written))


def test_hooks_are_refused_by_name():
    def hooked(register) -> str:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = register(model, optimizer)
        try:
            return refusal(step_with(model=model, optimizer=optimizer))
        finally:
            handle.remove()

    def nothing(*_):
        return None

    of_gradient = hooked(lambda model, _: model[0].weight.register_hook(nothing))
    assert "the gradient of model.0.weight has a hook" in of_gradient
    late = hooked(lambda model, _: model[2].bias.register_post_accumulate_grad_hook(nothing))
    assert "the gradient of model.2.bias has a hook" in late
    before = hooked(lambda _, optimizer: optimizer.register_step_pre_hook(nothing))
    assert "optimizer (before or after a step) has a hook" in before
    behind = hooked(lambda _, optimizer: optimizer.register_step_post_hook(nothing))
    assert "optimizer (before or after a step) has a hook" in behind
    backward = hooked(lambda model, _: model[0].register_full_backward_hook(nothing))
    assert "a module (Linear, backward) has a hook" in backward
    anywhere = hooked(lambda *_: register_optimizer_step_post_hook(nothing))
    assert "every optimizer" in anywhere


def test_an_optimizer_that_cannot_be_found_is_refused():
    model = mlp()
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        held = [held]

    def step(x, target):
        inner = held
        while isinstance(inner, list):
            inner = inner[0]
        F.mse_loss(model(x), target).backward()
        inner.step()

    assert "a SGD steps that the call does not refer to" in refusal(step)


def test_leaves_that_cannot_be_found_are_refused():
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = other
    for _ in range(9):
        held = [held]

    def step(x, target):
        inner = held
        while isinstance(inner, list):
            inner = inner[0]
        optimizer.zero_grad()
        F.mse_loss(model(x) + inner(x), target).backward()
        optimizer.step()

    assert "has a gradient, and the call does not refer to it" in refusal(step)


def test_control_flow_by_gradients_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 100:
            optimizer.step()
        return loss.detach()

    assert "which a replay cannot repeat" in refusal(step)


def test_a_gradient_that_eager_computes_by_values_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).prod(1), target.prod(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert "gradient of torch.prod" in refusal(step, *batch())


def test_dropout_inside_of_a_checkpoint_that_restores_the_generator_is_refused():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.get_rng_state()

    def step(x, target):
        optimizer.zero_grad()
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        F.mse_loss(y, target).backward()
        optimizer.step()

    assert "take dropout out of what is checkpointed" in refusal(step)
    assert not torch.equal(torch.get_rng_state(), state)  # the forward has drawn
    seeded = step_with(lambda: torch.manual_seed(0))
    assert "seeds or restores" in refusal(seeded)
    restored = step_with(lambda: torch.set_rng_state(state))
    assert "never does" in refusal(restored)


def test_a_scaler_that_reads_on_the_host_is_refused_with_what_to_set():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step(x, target):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), target)).backward()
        scaler.step(optimizer)
        scaler.update()

    message = refusal(step)
    assert "a GradScaler reads" in message
    assert "give the optimizer (SGD) fused=True" in message
    optimizer = torch.optim.RMSprop(model.parameters())
    assert "RMSprop has no fused=True" in refusal(step)

    def scale_read(x, target):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), target)).backward()
        return torch.ones(1) * scaler.get_scale()

    assert "call get_scale between the steps" in refusal(scale_read)


def test_averages_that_read_on_the_host_are_refused_with_what_to_do():
    model = mlp()
    mean = torch.optim.swa_utils.AveragedModel(model)
    mean.update_parameters(model)
    message = refusal(step_with(lambda: mean.update_parameters(model), model=model))
    assert "an AveragedModel reads" in message
    assert "call update_parameters between the steps" in message


class Sparse(nn.Module):
    def __init__(self, kind, *, sparse=True):
        super().__init__()
        self.layer = kind(10, 4, sparse=sparse)

    def forward(self, x):
        y = self.layer(x)
        return y if y.dim() == 2 else y.sum(1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("name", ["SparseAdam", "SGD"])
def test_sparse_gradients_are_refused_with_what_to_set(kind, name):
    given = torch.randint(10, (4, 3)), torch.randn(4, 4)
    for n_before in (0, 2):
        model = Sparse(kind)
        optimizer = getattr(torch.optim, name)(list(model.parameters()), lr=0.1)
        step = step_with(model=model, optimizer=optimizer)
        for _ in range(n_before):
            step(*given)
        message = refusal(step, *given)
        assert "this is a sparse gradient: give the layer that makes it sparse=False" in message
        assert "Adam instead of SparseAdam" in message
    model = Sparse(kind, sparse=False)
    optimizer = torch.optim.Adam(model.parameters())
    offload.capture(step_with(model=model, optimizer=optimizer), *given, training=True)


def test_a_sparse_gradient_that_the_step_does_not_concern_stays():
    other = Sparse(nn.Embedding)
    indices = torch.randint(10, (4, 3))
    other(indices).sum().backward()
    gradient = other.layer.weight.grad
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(other(x).detach()), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    given = indices, torch.randn(4, 4)
    run = offload.capture(step, *given, training=True).load()
    twin = copy.deepcopy((other, model))
    loss = run(*given)
    assert torch.equal(loss, F.mse_loss(twin[1](twin[0](indices)), given[1]))
    assert other.layer.weight.grad is gradient


def test_state_in_python_is_refused_in_the_step_behind_the_first():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = {"steps": 0}

    def step(x, target):
        counts["steps"] += 1
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()

    assert "counts['steps']: 1 became 2" in refusal(step)


def test_an_input_that_requires_gradients_is_refused():
    x, target = batch()
    assert "args[0] requires gradients" in refusal(step_with(), x.requires_grad_(), target)


def test_options_that_exclude_training():
    step = step_with()
    with pytest.raises(offload.CaptureError, match="weights= and training=True exclude"):
        offload.capture(step, *batch(), training=True, weights="nowhere")
    shapes = {"x": {0: torch.export.Dim("n")}, "target": None}
    with pytest.raises(offload.CaptureError, match="dynamic_shapes= and training=True exclude"):
        offload.capture(step, *batch(), training=True, dynamic_shapes=shapes)
    with torch.no_grad(), pytest.raises(offload.CaptureError, match="gradients are switched off"):
        offload.capture(step, *batch(), training=True)


def test_a_model_with_a_parameter_of_this_name_is_called_in_the_block():
    def double(x, training=False):
        return x * 2 if training else x

    x = torch.ones(3)
    for training in (False, True):
        with pytest.raises(offload.CaptureError, match="a parameter of this name as well"):
            offload.capture(double, x, training=training)
        with offload.capture(double) as captured:
            captured(x, training=training)
        assert torch.equal(captured(x, training=training), x * (2 if training else 1))
    assert torch.equal(offload.capture(double, x).recorded_result, x)


def test_loads_and_files_that_are_refused(tmp_path):
    captured = offload.capture(step_with(), *batch(), training=True)
    with pytest.raises(offload.BindingError, match=r"weights_budget: .* writes every weight"):
        captured.load(weights_budget="1GiB")
    with pytest.raises(offload.FileError, match=r"a training step.*state_dict"):
        captured.save(tmp_path / "step.offload")


# ---- leftovers of a refused or first step --------------------------------------------------------


def counted_step(model, counts=None):
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        if counts is not None:
            counts["steps"] += 1
        return loss.detach()

    return optimizer, step


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_is_one_step_and_a_refused_one_too(fails):
    """The step after the first is undone, whatever its outcome."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
    twin = copy.deepcopy(model)
    optimizer, ours = counted_step(model, {"steps": 0} if fails else None)
    other, eager = counted_step(twin)
    x, target = torch.randn(4, 8), torch.randn(4, 16)
    state = torch.get_rng_state()
    if fails:
        assert "counts['steps']" in refusal(ours, x, target)
    else:
        offload.capture(ours, x, target, training=True)
    left = torch.get_rng_state()
    torch.set_rng_state(state)
    eager(x, target)
    assert torch.equal(left, torch.get_rng_state())
    for (name, one), same in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, same), name
        assert torch.equal(one.grad, same.grad), name
        for key, item in other.state[same].items():
            assert torch.equal(optimizer.state[one][key], item), key
    for one, same in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, same)
