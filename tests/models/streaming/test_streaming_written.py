"""Writes to weights in memory that the next execution under a budget sees or misses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budgets import budgets_of
from torch import nn

import offload

WIDTH = 64
GIVEN = torch.randn(3, WIDTH)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).eval()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda weights, **how: torch.optim.SGD(weights, lr=0.01, momentum=0.9, **how),
    "Adam": lambda weights, **how: torch.optim.Adam(weights, lr=0.1, **how),
    "AdamW": lambda weights, **how: torch.optim.AdamW(weights, lr=0.1, amsgrad=True, **how),
    "Adagrad": lambda weights, **how: torch.optim.Adagrad(weights, lr=0.1, **how),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["fused", "foreach", "for loop"])
def test_steps_of_optimizers_are_seen(name: str, how: str) -> None:
    model = layers()
    with torch.no_grad():
        captured = offload.capture(model, GIVEN)
    fused = {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
    optimizer = OPTIMIZERS[name](model.parameters(), **fused)
    for budget in budgets_of(captured):
        with captured.load(weights_budget=budget) as run:
            for _ in range(3):
                optimizer.zero_grad()
                model(GIVEN).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    assert torch.equal(run(GIVEN), model(GIVEN))
                    assert torch.equal(run.submit(GIVEN).result(), model(GIVEN))


def test_a_step_on_views_of_one_storage_is_seen() -> None:
    model = layers()
    flat = nn.Parameter(torch.randn(sum(one.numel() for one in model.parameters())))
    begin = 0
    for one in model.parameters():
        one.data = flat.data[begin : begin + one.numel()].view_as(one)
        begin += one.numel()
    with torch.no_grad():
        captured = offload.capture(model, GIVEN)
    optimizer = torch.optim.SGD([flat], lr=0.1, fused=True)
    for budget in budgets_of(captured):
        with captured.load(weights_budget=budget) as run, torch.no_grad():
            assert torch.equal(run(GIVEN), model(GIVEN))
            flat.grad = torch.randn_like(flat)
            optimizer.step()
            assert torch.equal(run(GIVEN), model(GIVEN))


def test_only_what_was_stepped_is_read_again() -> None:
    model, others = layers(), layers()
    with torch.no_grad():
        captured = offload.capture(model, GIVEN)
        run = captured.load(weights_budget=budgets_of(captured)[-1])
        expected = run(GIVEN)
        stepped = torch.optim.SGD(others.parameters(), lr=0.1, fused=True)
        for one in others.parameters():
            one.grad = torch.ones_like(one)
        stepped.step()
        assert torch.equal(run(GIVEN), expected)
        assert run.last_execution.bytes_streamed == 0
        assert run._loaded.weights.stream.generation == 1
        run.close()
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()  # of a closed executable


def in_inference_mode(model: nn.Sequential) -> None:
    with torch.inference_mode():
        model[1].weight.copy_(torch.randn(WIDTH, WIDTH))


def averaged(model: nn.Sequential) -> None:
    average = torch.optim.swa_utils.AveragedModel(
        copy.deepcopy(model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.module = model
    average.update_parameters(layers())
    average.update_parameters(layers())


def detached(model: nn.Sequential) -> list[torch.Tensor]:
    return [one.detach() for one in model.parameters()]


SEEN: dict[str, Callable[[nn.Sequential], Any]] = {
    "in place": lambda model: model[1].weight.add_(1),
    "through a view": lambda model: model[1].weight[3:].mul_(2),
    "through detach()": lambda model: model[1].weight.detach().mul_(2),
    "copy_ in inference mode": in_inference_mode,
    "load_state_dict": lambda model: model.load_state_dict(layers().state_dict()),
    "torch.nn.init": lambda model: nn.init.normal_(model[1].weight),
    "averaged models": averaged,
    "torch._foreach_mul_": lambda model: torch._foreach_mul_(detached(model), 2.0),
    "torch._foreach_copy_": lambda model: torch._foreach_copy_(detached(model), detached(layers())),
    "out=": lambda model: torch.mul(model[1].weight, 2, out=model[1].weight.detach()),
}
UNSEEN: dict[str, Callable[[nn.Sequential], Any]] = {
    "param.data": lambda model: model[1].weight.data.mul_(2),
    "a fused operator itself": lambda model: torch._fused_sgd_(
        [model[1].weight],
        [torch.ones(WIDTH, WIDTH)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
    "numpy": lambda model: model[1].weight.detach().numpy().fill(0.5),
    "the storage": lambda model: model[1].weight.untyped_storage().fill_(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SEEN)
def test_writes_that_are_seen(how: str) -> None:
    model = layers()
    with torch.no_grad():
        captured = offload.capture(model, GIVEN)
        for budget in budgets_of(captured):
            with captured.load(weights_budget=budget) as run:
                before = run(GIVEN)
                SEEN[how](model)
                assert not torch.equal(model(GIVEN), before)
                assert torch.equal(run(GIVEN), model(GIVEN))


def test_parameters_that_become_views_of_one_vector_are_refused() -> None:
    model = layers()
    with torch.no_grad():
        captured = offload.capture(model, GIVEN)
        for budget in budgets_of(captured):
            with captured.load(weights_budget=budget) as run:
                run(GIVEN)
                kept = [one.data for one in model.parameters()]
                vector = nn.utils.parameters_to_vector(layers().parameters())
                nn.utils.vector_to_parameters(vector, model.parameters())
                for use in (functools.partial(run, GIVEN), run.rebind_weights):
                    with pytest.raises(offload.BindingError, match="another shape, dtype, strides"):
                        use()
                for one, data in zip(model.parameters(), kept, strict=True):
                    one.data = data
                assert torch.equal(run(GIVEN), model(GIVEN))


@pytest.mark.parametrize("how", UNSEEN)
def test_writes_that_are_seen_after_a_refresh_alone(how: str) -> None:
    model = layers()
    with torch.no_grad():
        captured = offload.capture(model, GIVEN)
        run = captured.load(weights_budget=budgets_of(captured)[-1])
        before = run(GIVEN)
        UNSEEN[how](model)
        assert torch.equal(run(GIVEN), before)  # a limit that the docstring of load states
        run.streaming.refresh()
        assert torch.equal(run(GIVEN), model(GIVEN))
        assert not torch.equal(run(GIVEN), before)
