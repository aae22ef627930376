"""Training steps that are cut into stages, and changes of the orders of their ranks."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import torch
from torch import nn

import offload
from offload.plan.rank_orders import Exchange, RankOrder, RankStep
from offload.plan.schedules import Schedule
from offload.plan.topology import Link
from offload.plan.training_stages import TrainingStages, cut_training

N_LAYERS = 4
LINK = Link(bytes_per_second=1e9, overhead_ns=500.0)
ONE_BY_ONE = Schedule.ONE_FORWARD_ONE_BACKWARD


class Residual(nn.Module):
    """Layers beside their inputs, so that some messages skip stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(N_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = torch.relu(layer(y)) + x
        return y


def captured_step(
    n_micro_batches: int,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    model: nn.Module | None = None,
    **options: object,
) -> offload.Captured:
    torch.manual_seed(0)
    model = Residual() if model is None else model
    stepping = optimizer(model.parameters(), lr=0.01, **options)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = 0
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            one = (model(x) - target).square().mean() / n_micro_batches
            one.backward()
            loss += one.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()
        stepping.zero_grad(set_to_none=False)
        return loss

    batch = torch.randn(2, n_micro_batches, 3, 8)
    captured = offload.capture(step, *batch, training=True)
    assert isinstance(captured, offload.Captured)
    return captured


@functools.cache
def recorded(n_micro_batches: int) -> offload.Captured:
    kinds = [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
    ]
    optimizer, options = kinds[n_micro_batches % 4]
    return captured_step(n_micro_batches, optimizer, **options)


def cut(
    captured: offload.Captured, n_stages: int, schedule: Schedule = ONE_BY_ONE, seed: int = 0
) -> TrainingStages:
    draws = random.Random(seed)
    launch_ns = [float(draws.randint(100, 2000)) for _ in captured.program.launches]
    return cut_training(captured.program, launch_ns, LINK, n_stages, schedule=schedule)


def changed(
    stages: TrainingStages, rank: int, change: Callable[[list[RankStep]], None]
) -> list[RankOrder]:
    orders = list(stages.orders)
    steps = list(orders[rank].steps)
    change(steps)
    orders[rank] = dataclasses.replace(orders[rank], steps=tuple(steps))
    return orders


def first(steps: list[RankStep], which: Callable[[RankStep], bool]) -> int:
    return next(at for at, one in enumerate(steps) if which(one))


def is_end(one: RankStep, *, sends: bool, waits: bool) -> bool:
    return isinstance(one, Exchange) and (one.sends, one.waits) == (sends, waits)


def moved_behind_everything(which: Callable[[RankStep], bool]) -> Callable[[list[RankStep]], None]:
    def change(steps: list[RankStep]) -> None:
        steps.append(steps.pop(first(steps, which)))

    return change


def moved_to_the_front(which: Callable[[RankStep], bool]) -> Callable[[list[RankStep]], None]:
    def change(steps: list[RankStep]) -> None:
        steps.insert(0, steps.pop(first(steps, which)))

    return change


def left_out(which: Callable[[RankStep], bool]) -> Callable[[list[RankStep]], None]:
    def change(steps: list[RankStep]) -> None:
        steps.pop(first(steps, which))

    return change
