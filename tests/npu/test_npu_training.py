"""Training steps on torch_npu, against eager on the same device, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import nn

import offload

Optimizer = torch.optim.Optimizer
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# torch_npu computes foreach and fused updates by operators that the simulation lacks.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(
        given, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False
    ),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=1e-2, capturable=True, foreach=False),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=1e-3, capturable=True, foreach=False),
}


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


def stepping(trained: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = ((trained(x) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(6, 16).npu(), torch.randn(6, 8).npu()) for _ in range(count)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_eager(name: str) -> None:
    trained = model().npu()
    expected = copy.deepcopy(trained)
    ours, theirs = (OPTIMIZERS[name](one.parameters()) for one in (trained, expected))
    step, eager = stepping(trained, ours), stepping(expected, theirs)
    given = batches(6)
    step(*given[0])
    captured = offload.capture(step, *given[0], training=True)
    eager(*given[0]), eager(*given[0])
    with captured.load() as run:
        for batch in given:
            assert torch.equal(run(*batch).cpu(), eager(*batch).cpu())
            for one, other in zip(trained.parameters(), expected.parameters(), strict=True):
                assert torch.equal(one.cpu(), other.cpu())
                for key, item in ours.state[one].items():
                    assert torch.equal(item.cpu(), theirs.state[other][key].cpu())


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (torch.optim.AdamW, "fused=True, or capturable=True"),
        (torch.optim.RMSprop, "capturable=True"),
    ],
)
def test_a_counter_on_the_host_is_refused(make: Callable[..., Optimizer], advice: str) -> None:
    trained = model().npu()
    step = stepping(trained, make(trained.parameters(), lr=1e-3, foreach=False))
    (batch,) = batches(1)
    step(*batch)
    with pytest.raises(offload.CaptureError, match=f"step of .* on the CPU.*{advice}"):
        offload.capture(step, *batch, training=True)
