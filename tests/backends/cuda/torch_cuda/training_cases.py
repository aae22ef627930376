"""Training steps on the simulated driver, by torch's real dispatch: run by `test_cuda_kernels`.

Unlike `cases`, steps are recorded on the device: forward, backward and optimizer are torch's own on
tensors of the stand-in, and so is the eager step that they are compared with. No GPU has run this.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

from cases import backend, cuda, settled  # noqa: F401
from kernel_cases import launched  # noqa: F401

import offload
from offload.program import Kernel

N_STEPS = 6
N_LONG = 20


class Model(nn.Module):
    """A weight that is used twice, and chains of operators; few shapes to compile kernels for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(self.first(x * self.scale), (8,))
        y = nn.functional.gelu(y, approximate="tanh")
        return (self.last(y) + x).tanh() * self.scale


def step_of(model, optimizer, *, clip=False, scaler=None):
    def step(x, target):
        loss = ((model(x) - target) ** 2).mean()
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if clip and scaler is not None:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


OPTIMIZERS = {
    "SGD": lambda of: torch.optim.SGD(of, lr=0.05, momentum=0.9, foreach=False),
    "SGD, foreach": lambda of: torch.optim.SGD(of, lr=0.05, momentum=0.9),
    "AdamW": lambda of: torch.optim.AdamW(of, lr=1e-3, eps=1e-4, capturable=True, foreach=False),
    "AdamW, foreach": lambda of: torch.optim.AdamW(of, lr=1e-3, eps=1e-4, capturable=True),
    "AdamW, fused": lambda of: torch.optim.AdamW(of, lr=1e-3, eps=1e-4, fused=True),
    "AdamW, rate": lambda of: torch.optim.AdamW(
        of, lr=torch.tensor(1e-3).to("cuda"), eps=1e-4, capturable=True
    ),
}

OTHERS = {
    "Adamax": lambda of: torch.optim.Adamax(of, capturable=True),
    "ASGD": lambda of: torch.optim.ASGD(of, capturable=True),
    "RAdam": lambda of: torch.optim.RAdam(of, capturable=True),
    "NAdam": lambda of: torch.optim.NAdam(of, capturable=True, foreach=False),
}


def twins(optimizer):
    torch.manual_seed(0)
    model = Model()
    models = model.to("cuda"), copy.deepcopy(model).to("cuda")
    return [(one, {**OPTIMIZERS, **OTHERS}[optimizer](one.parameters())) for one in models]


def batches(n_steps=N_STEPS):
    torch.manual_seed(1)
    return [(torch.randn(5, 8).to("cuda"), torch.randn(5, 8).to("cuda")) for _ in range(n_steps)]


def left(model, optimizer):
    """All that a step leaves, by name."""
    found = {name: one.detach() for name, one in model.state_dict().items()}
    for name, one in model.named_parameters():
        found[f"gradient of {name}"] = one.grad
        for key, item in optimizer.state[one].items():
            found[f"{key} of {name}"] = item
    return {name: one.to("cpu") for name, one in found.items()}


def assert_near(ours, eager, tolerance):
    found, expected = left(*ours), left(*eager)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(
            found[name], one, rtol=tolerance, atol=tolerance, msg=lambda text, of=name: of + text
        )


def n_kernels(run):
    return sum(isinstance(one.callee, Kernel) for one in run.program.launches)


def check(optimizer, *, n_steps=N_STEPS, fuse=False, has_kernels=False, scaled=False, **options):
    """Compare steps with eager ones, between which the learning rate changes where it may."""
    given = batches(n_steps)
    sides = twins(optimizer)
    scalers = [
        torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3) if scaled else None
        for _ in sides
    ]
    steps = [
        step_of(*side, scaler=one, **options) for side, one in zip(sides, scalers, strict=True)
    ]
    captured = offload.capture(steps[0], *given[0], training=True)
    steps[1](*given[0])
    tolerance = 1e-4 if has_kernels else 0
    assert captured.program.device == "cuda"
    before = left(*sides[0])
    with captured.load(device=backend(), fuse=fuse) as run:
        assert all(map(torch.equal, left(*sides[0]).values(), before.values()))
        for number, batch in enumerate(given):
            loss, expected = run(*batch).to("cpu"), steps[1](*batch).to("cpu")
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            assert_near(*sides, tolerance)
            for _, one in sides if "rate" in optimizer and number % 2 else ():
                one.param_groups[0]["lr"].mul_(0.5)
        assert bool(n_kernels(run)) is has_kernels
        return run


@pytest.mark.parametrize("optimizer", {**OPTIMIZERS, **OTHERS})
def test_steps_are_those_of_eager(optimizer):
    check(optimizer, n_steps=N_LONG)


def test_gradients_are_clipped_and_scaled():
    check("AdamW, fused", scaled=True)
    check("SGD, foreach", clip=True)
    check("AdamW, fused", n_steps=N_LONG, scaled=True, clip=True)


@pytest.mark.parametrize("optimizer", [one for one in OPTIMIZERS if one != "SGD"])
def test_steps_with_compiled_kernels_are_near_eager(launched, optimizer):  # noqa: F811
    launched.names.clear()
    run = check(optimizer, fuse=True, has_kernels=True)
    assert not any(one.failure for one in run.fusion.proofs)
    assert launched.names


def test_kernels_that_compute_something_else_are_not_used(launched):  # noqa: F811
    """Nor do they leave anything: parameters, gradients and state are as before the load."""
    launched.is_wrong = True
    run = check("AdamW, foreach", fuse=True)
    assert "its kernel failed its proof" in run.explain()


def test_counters_on_the_host_are_refused():
    (model, _), _ = twins("SGD")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(offload.CaptureError, match="capturable=True"):
        offload.capture(step_of(model, optimizer), *batches()[0], training=True)
