"""Training steps on a GPU, against eager: as far from it as eager is from itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offload

N_STEPS = 20
N_EAGER = 3  # runs of eager, whose distances are the noise

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def gradients(device: torch.device) -> Iterator[None]:
    with torch.enable_grad():
        yield


class Convolutions(nn.Module):
    """Filter gradients, whose order of sums cuDNN may change, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.last = nn.Conv2d(16, 16, 3, stride=2), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).relu()
        return self.last(self.second(y).relu().mean((2, 3)))


class Transformer(nn.Module):
    """An embedding, whose gradient is summed by atomics, attention, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


Batch = tuple[torch.Tensor, torch.Tensor]


def of_images() -> Batch:
    return torch.randn(8, 3, 12, 12, device=DEVICE), torch.randint(10, (8,), device=DEVICE)


def of_tokens() -> Batch:
    ids = torch.randint(64, (4, 16), device=DEVICE)
    return ids, torch.randint(64, (4, 16), device=DEVICE)


def of_rows() -> Batch:
    return torch.randn(16, 64, device=DEVICE), torch.randint(10, (16,), device=DEVICE)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "layers": (layers, of_rows),
    "convolutions": (Convolutions, of_images),
    "a transformer": (Transformer, of_tokens),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=1e-3, capturable=True),
    "AdamW, one by one": lambda given: torch.optim.AdamW(
        given, lr=1e-3, capturable=True, foreach=False
    ),
    "AdamW, fused": lambda given: torch.optim.AdamW(given, lr=1e-3, fused=True),
}


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), target.flatten())


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """In half precision, with factors that keep gradients from vanishing."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=4)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.float16):
            loss = loss_of(model, x, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of weights, buffers, gradients and the optimizer's state."""
    kept = [one.detach().double() for one in model.state_dict().values()]
    for one in model.parameters():
        assert one.grad is not None
        state = optimizer.state[one].values()
        kept += [one.grad.double(), *(item.double() for item in state)]
    return [one.clone() for one in kept]


def distances(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(one, other, strict=True)]


def check_as_near_as_eager(
    make_step: Callable[..., Any],
    make_model: Callable[[], nn.Module],
    batches: list[Batch],
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Train copies of one model, the first captured; where eager repeats its bits, so must it."""
    first = make_model().to(DEVICE)
    models = [first, *(copy.deepcopy(first) for _ in range(N_EAGER))]
    optimizers = [make_optimizer(one.parameters()) for one in models]
    steps = [make_step(*pair) for pair in zip(models, optimizers, strict=True)]
    for step in steps:
        step(*batches[0])
    captured = offload.capture(steps[0], *batches[0], training=True)
    for step in steps[1:]:
        step(*batches[0])
    with captured.load() as run:
        for batch in batches:
            run(*batch)
            for step in steps[1:]:
                step(*batch)
    found, *eager = map(content, models, optimizers)
    noise = [
        max(of_one)
        for of_one in zip(
            *(distances(eager[0], other) for other in eager[1:]),
            distances(eager[1], eager[2]),
            strict=True,
        )
    ]
    for at, distance in enumerate(distances(found, eager[0])):
        assert distance <= 3 * noise[at], f"tensor {at}: {distance}, eager {noise[at]}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_as_near_as_eager(name: str, optimizer: str) -> None:
    make_model, make_batch = MODELS[name]
    batches = [make_batch() for _ in range(N_STEPS)]
    check_as_near_as_eager(clipped, make_model, batches, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("name", MODELS)
def test_steps_in_half_precision_are_as_near_as_eager(name: str) -> None:
    make_model, make_batch = MODELS[name]
    batches = [make_batch() for _ in range(N_STEPS)]
    check_as_near_as_eager(scaled, make_model, batches, OPTIMIZERS["AdamW, fused"])


def test_a_counter_on_the_host_is_refused() -> None:
    """AdamW's default on a GPU."""
    model = layers().to(DEVICE)
    step, batch = clipped(model, torch.optim.AdamW(model.parameters())), of_rows()
    step(*batch)
    with pytest.raises(offload.CaptureError, match="fused=True, or capturable=True"):
        offload.capture(step, *batch, training=True)
