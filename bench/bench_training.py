"""Claim: a captured step of training is quicker than eager, and than torch.compile's.

Forward, loss, backward, the optimizer's step; each contender trains its own model, equal at the
beginning, on different batches each time. torch.compile gets the model, and separately the
optimizer's step.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from measurements import Case, figure_of, ratio_of, reason
from models import Block, mlp16
from turns import take_turns

OURS, EAGER, COMPILED = "offload", "eager", "torch.compile, model and step"
N_BATCHES = 16

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def deep() -> tuple[nn.Module, list[Batch]]:
    return mlp16()[0].train(), _batches((1, 64), (1, 64))


def wide() -> tuple[nn.Module, list[Batch]]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers), _batches((32, 256), (32, 256))


def blocks() -> tuple[nn.Module, list[Batch]]:
    return nn.Sequential(Block(64, 4), Block(64, 4)), _batches((1, 16, 64), (1, 16, 64))


def _batches(given: tuple[int, ...], target: tuple[int, ...]) -> list[Batch]:
    return [(torch.randn(given), torch.randn(target)) for _ in range(N_BATCHES)]


MODELS = {
    "mlp16": ("16 × (Linear 64, ReLU), batch 1", deep),
    "wide": ("4 × (Linear 256, ReLU), batch 32", wide),
    "blocks": ("2 GPT blocks, width 64, 16 tokens", blocks),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=1e-4),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=1e-5),
    "AdamW, fused": lambda given: torch.optim.AdamW(given, lr=1e-5, fused=True),
}
# The promised speed-up of each over eager.
GAINS = {
    ("mlp16", "SGD"): 5.0,
    ("mlp16", "AdamW"): 3.8,
    ("mlp16", "AdamW, fused"): 3.8,
    ("blocks", "SGD"): 2.5,
    ("blocks", "AdamW"): 2.5,
    ("blocks", "AdamW, fused"): 2.5,
}


def step_of(model: Callable[..., Any], optimizer: Any, update: Callable[[], Any]) -> Step:
    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)
        loss.backward()
        update()
        return loss.detach()

    return step


def compiled_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    update = torch.compile(optimizer.step)
    return step_of(torch.compile(model), optimizer, update)


def cycling(step: Callable[..., Any], batches: list[Batch]) -> Callable[[], Any]:
    given: Iterator[Batch] = itertools.cycle(batches)
    return lambda: step(*next(given))


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training(
    benchmark: Any, record: Callable[[Case], None], name: str, optimizer: str
) -> None:
    torch.set_num_threads(1)
    title, make = MODELS[name]
    torch.manual_seed(0)
    model, batches = make()
    twins = {one: copy.deepcopy(model) for one in (OURS, EAGER, COMPILED)}
    owned = {one: OPTIMIZERS[optimizer](twin.parameters()) for one, twin in twins.items()}
    steps = {one: step_of(twins[one], owned[one], owned[one].step) for one in (OURS, EAGER)}
    captured = offload.capture(steps[OURS], *batches[0], training=True)
    assert torch.equal(captured.recorded_result, steps[EAGER](*batches[0]))
    run = captured.load()
    for batch in batches:
        assert torch.equal(run(*batch), steps[EAGER](*batch))
    calls = {OURS: cycling(run, batches), EAGER: cycling(steps[EAGER], batches)}
    absent = {}
    try:
        compiled = compiled_step(twins[COMPILED], owned[COMPILED])
        for batch in batches[:3]:
            compiled(*batch)
        calls[COMPILED] = cycling(compiled, batches)
    except Exception as error:  # no compiler, or a torch that does not compile steps here
        absent[COMPILED] = reason(error)
    times = take_turns(calls)
    at_least = GAINS.get((name, optimizer), 1.0)
    ratios = {EAGER: ratio_of(times[EAGER], times[OURS], at_least=at_least)}
    if COMPILED in times:
        ratios[COMPILED] = ratio_of(times[COMPILED], times[OURS], at_least=1)
    record(
        Case(
            f"{title}; {optimizer}",
            ratios=ratios,
            figures={one: figure_of(times[one], "ns") for one in times},
            absent=absent,
        )
    )
    benchmark.pedantic(calls[OURS], rounds=20, iterations=10, warmup_rounds=2)
