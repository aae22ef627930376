"""Steps of many kinds that can be cut into stages, by name, and their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SIZE, ROWS = 8, 4
KINDS: dict[str, Callable[[int], tuple[Callable[..., Any], int]]] = {}


def kind(function: Callable[[int], tuple[Callable[..., Any], int]]) -> Any:
    """A step by its number of micro-batches, with the number that offload finds."""
    KINDS[function.__name__] = function
    return function


def layers(n: int = 4, *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    kinds = (nn.Linear(SIZE, SIZE), *more, nn.Tanh())
    return nn.Sequential(*(copy.deepcopy(one) for _ in range(n) for one in kinds)).apply(redrawn)


def redrawn(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def sgd(*models: nn.Module, **options: Any) -> torch.optim.Optimizer:
    parameters = [one for model in models for one in model.parameters() if one.requires_grad]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options)


def loss_of(y: torch.Tensor, target: torch.Tensor, n: int) -> torch.Tensor:
    return functional.mse_loss(y, target) / n


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> Callable[..., Any]:
    def step(xs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: Any = 0
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            one = loss_of(model(x), target, n)
            one.backward()
            loss += one.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step


@kind
def plain(n):
    model = layers()
    return usual(model, sgd(model), n), n


@kind
def in_place(n):
    model = layers(4, nn.ReLU(inplace=True), nn.BatchNorm1d(SIZE))
    return usual(model, sgd(model, foreach=True), n), n


@kind
def frozen_below(n):
    model = layers()
    model[:4].requires_grad_(False)
    return usual(model, sgd(model), n), n


@kind
def frozen_above(n):
    model = layers()
    model[4:].requires_grad_(False)
    return usual(model, sgd(model), n), n


class Skipping(nn.Module):
    """The input and the first activations are read by the last layer; the first weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = layer(y)
        return functional.linear(y + first * x, self.layers[0].weight)


@kind
def skipping(n):
    model = Skipping()
    return usual(model, torch.optim.AdamW(model.parameters(), foreach=True), n), n


@kind
def with_adamax(n):
    """Numbers of step counters scale the tensors of a list."""
    model = layers()
    return usual(model, torch.optim.Adamax(model.parameters(), foreach=True), n), n


@kind
def with_asgd(n):
    """It averages from the fourth step on, with numbers of step counters."""
    model = layers()
    return usual(model, torch.optim.ASGD(model.parameters(), t0=2.0, foreach=True), n), n


@kind
def with_a_rate_of_the_step(n):
    """The step sets the learning rate of all stages from its arguments."""
    model = layers()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    inner = usual(model, optimizer, n)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        optimizer.param_groups[0]["lr"].copy_(targets.abs().mean() * 0.01)
        return inner(xs, targets)

    return step, n


@kind
def checkpointed(n):
    model = layers()

    def call(x: torch.Tensor) -> torch.Tensor:
        for at in range(0, len(model), 2):
            x = checkpoint(model[at : at + 2], x, use_reentrant=False, preserve_rng_state=False)
        return x

    call.parameters = model.parameters  # type: ignore[attr-defined]
    return usual(call, sgd(model), n), n  # type: ignore[arg-type]


@kind
def in_bfloat16(n):
    model = layers()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    return usual(call, sgd(model), n), n  # type: ignore[arg-type]


@kind
def all_forward_first(n):
    model, optimizer = layers(), None
    optimizer = sgd(model)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        losses = [
            loss_of(model(x), target, n)
            for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True)
        ]
        for one in losses:
            one.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return torch.stack([one.detach() for one in losses])

    return step, n


@kind
def penalized(n):
    """Each micro-batch has a gradient in its forward pass."""
    model = layers()
    optimizer = sgd(model)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        loss: Any = 0
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            x = x * 1  # noqa: PLW2901
            x.requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            one = loss_of(y, target, n) + slope.square().mean()
            one.backward()
            loss += one.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step, n


@kind
def clipped_and_averaged(n):
    """The norm is a result; an average of the parameters follows them; two optimizers."""
    model, mean = layers(), layers()
    mean.requires_grad_(False)
    optimizers = [sgd(model[:4]), torch.optim.AdamW(model[4:].parameters(), fused=True)]

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses = []
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            one = loss_of(model(x), target, n)
            one.backward()
            losses.append(one.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for one, other in zip(mean.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)
        return {"loss": torch.stack(losses).sum(), "norm": norm.detach()}

    return step, n


@kind
def dropping(n):
    """Masks of dropout, also in place; the norm of gradients is clipped."""
    model = layers(4, nn.Dropout(0.4), nn.Dropout(0.2, inplace=True), nn.AlphaDropout(0.3))
    return usual(model, sgd(model), n), n


class Noisy(nn.Module):
    """Draws of many kinds, from two generators; some are not used, some are used by two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.draws = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.rand(ROWS, 1) + 0.5
        torch.randn(5)
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at % 2:
                x = x + 0.1 * torch.randn_like(x) * shared
                x = x * torch.rand(SIZE, generator=self.draws)
                x = x * torch.randint_like(x, 1, 3) * torch.randint(1, 3, (ROWS, 1))
                order = torch.randperm(SIZE)
                x = x[:, order] * torch.bernoulli(torch.full((SIZE,), 0.8))
        return x


@kind
def noisy(n):
    model = Noisy()
    return usual(model, torch.optim.AdamW(model.parameters(), foreach=True), n), n


@kind
def drawing_in_backward(n):
    """A checkpoint draws anew in each backward pass, which schedules put behind later passes."""
    model = layers(4, nn.Dropout(0.3))

    def call(x: torch.Tensor) -> torch.Tensor:
        for at in range(0, len(model), 3):
            x = checkpoint(model[at : at + 3], x, use_reentrant=False, preserve_rng_state=False)
        return x

    call.parameters = model.parameters  # type: ignore[attr-defined]
    return usual(call, sgd(model), n), n  # type: ignore[arg-type]


@kind
def noise_in_the_update(n):
    """Langevin dynamics: noise on each parameter behind the optimizer."""
    model = layers()
    optimizer = sgd(model)
    inner = usual(model, optimizer, n)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        loss = inner(xs, targets)
        with torch.no_grad():
            for one in model.parameters():
                one.add_(torch.randn_like(one), alpha=0.01)
        return loss

    return step, n


class Overflowing(nn.Module):
    """For large inputs the gradients of the first layer alone are not finite."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.first, self.others = nn.Linear(SIZE, SIZE), layers(3, *more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.where(x.abs().amax() > 9, 1e37, 1.0)
        y = self.first(x)
        amplified = y * factor
        return self.others(amplified - amplified.detach() + y.detach())


def scaled(
    optimizer: torch.optim.Optimizer, model: nn.Module, n: int, *, norm: float = 0.0
) -> tuple[Callable[..., Any], int]:
    """Losses are scaled; gradients may overflow, and then nothing is updated."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        loss: Any = 0
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            one = loss_of(model(x), target, n)
            scaler.scale(one).backward()
            loss += one.detach()
        if norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step, n


@kind
def with_scaler(n):
    model = Overflowing()
    return scaled(sgd(model, fused=True), model, n)


@kind
def with_scaler_and_adamw(n):
    model = Overflowing(nn.Dropout(0.2))
    return scaled(torch.optim.AdamW(model.parameters(), fused=True), model, n, norm=0.1)


def inputs_of(seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(n, ROWS, SIZE, generator=draws) for _ in range(2))
    if seed == 2:
        x[-1, 0, 0] = 10.0
    return x, target
