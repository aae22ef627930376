"""Steps that are captured without training=True: refused with what to do, where they train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from training import batch, mlp, refusal, simple_step

import offload


def test_a_step_without_training_names_it():
    def enabled(x, target):
        with torch.enable_grad():
            return step(x, target)

    model = mlp()
    step = simple_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
    assert "training=True" in refusal(step, training=False)  # no gradients to differentiate
    assert "training=True" in refusal(enabled, training=False)


@pytest.mark.parametrize("depth", [1, 9])
def test_gradients_without_training_are_noticed_however_deep(depth):
    model = mlp()
    held = model
    for _ in range(depth):
        held = [held]

    def step(x, target):
        inner = held
        while isinstance(inner, list):
            inner = inner[0]
        with torch.enable_grad():
            loss = F.mse_loss(inner(x), target)
            loss.backward()
        return loss.detach()

    message = refusal(step, training=False)
    assert "changed the gradient of" in message
    assert "training=True" in message


def test_a_step_of_an_optimizer_without_training_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in model.parameters():
        one.grad = torch.ones_like(one)

    def step(x):
        y = model(x)
        optimizer.step()
        return y

    message = refusal(step, torch.randn(4, 8), training=False)
    assert "steps an optimizer (SGD)" in message
    assert "training=True" in message


def test_a_call_without_training_is_what_it_was():
    model = mlp()
    with torch.no_grad():
        captured = offload.capture(model, batch()[0])
    assert captured.bindings.before_execution is None
    run = captured.load()
    assert type(run) is offload.Executable
    x = torch.randn(4, 8)
    assert torch.equal(run(x), model(x).detach())
