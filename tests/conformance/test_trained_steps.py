"""Training steps on every computing backend: losses, weights, gradients and state, as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

N_STEPS = 20

_NOT_ON_NPU = "torch_npu trains by operators that are not simulated: tests/npu/test_npu_training.py"


@pytest.fixture
def computing(backend):
    """A backend whose results have content."""
    if not backend.capabilities.computes:
        pytest.skip("it computes nothing")
    return backend


def mse_loss(found, wanted):
    """Of operators that every simulated device has."""
    return ((found - wanted) ** 2).mean()


class Model(nn.Module):
    """Layers with running statistics, a tied weight, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.norm, self.scale = nn.BatchNorm1d(16), nn.Parameter(torch.ones(8))
        self.last = nn.Linear(16, 8)
        self.last.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x * self.scale)).relu()
        return self.last(y) * self.scale + self.second(y).tanh()


def plain(model, optimizer):
    def step(x, target):
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def clipped(model, optimizer):
    def step(x, target):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), norm

    return step


def accumulated(model, optimizer):
    def step(x, target):
        losses = []
        for one, other in zip(x.chunk(3), target.chunk(3), strict=True):
            loss = mse_loss(model(one), other) / 3
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return torch.stack(losses)

    return step


def recomputed(model, optimizer):
    def step(x, target):
        y = checkpoint(model.first, x, use_reentrant=False, preserve_rng_state=False)
        loss = mse_loss(model.last(y.relu()), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)

    def step(x, target):
        loss = mse_loss(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach(), scaler._scale * 1

    return step


STEPS = {one.__name__: one for one in (plain, clipped, accumulated, recomputed)}

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.05, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-2), fused=True
    ),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, foreach=False),
}


def check_same(model, optimizer, expected, expected_optimizer):
    for one, other in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
        state, expected_state = optimizer.state[one], expected_optimizer.state[other]
        assert state.keys() == expected_state.keys()
        for key, item in state.items():
            assert torch.equal(torch.as_tensor(item), torch.as_tensor(expected_state[key]))


CASES = [
    *((step, optimizer) for step in STEPS for optimizer in OPTIMIZERS),
    ("scaled", "AdamW, fused"),  # others read on the host whether a gradient is infinite
]


@pytest.mark.parametrize(("step", "optimizer"), CASES)
def test_steps_are_those_of_eager(computing, step, optimizer):
    if computing.records() == "npu":
        pytest.skip(_NOT_ON_NPU)
    if step == "scaled" and computing.name == "cuda-simulated":
        pytest.skip("a scaler copies to the device of its gradients, by name: here the CPU")
    torch.manual_seed(0)
    model = Model()
    expected = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[optimizer](one.parameters()) for one in (model, expected))
    make = {**STEPS, "scaled": scaled}[step]
    captured_step, eager = make(model, ours), make(expected, theirs)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(one, step_size=4, gamma=0.5)
        for one in (ours, theirs)
        if isinstance(one.param_groups[0]["lr"], torch.Tensor)
    ]
    batches = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(N_STEPS)]
    captured_step(*batches[0])
    captured = offload.capture(captured_step, *batches[0], training=True)
    eager(*batches[0]), eager(*batches[0])
    with captured.load(device=computing.name) as run:
        for batch in batches:
            torch.testing.assert_close(run(*batch), eager(*batch), rtol=0, atol=0)
            check_same(model, ours, expected, theirs)
            for one in schedulers:
                one.step()
    captured_step(*batches[0]), eager(*batches[0])
    check_same(model, ours, expected, theirs)


def test_a_step_that_does_not_fit_changes_nothing(computing):
    """The comparison with the recorded step comes before any launch, on every device."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    step, batch = plain(model, optimizer), (torch.randn(3, 4), torch.randn(3, 2))
    step(*batch)
    captured = offload.capture(step, *batch, training=True)
    with captured.load(device=computing.name) as run:
        run(*batch)
        kept = [*model.parameters(), *(one.grad for one in model.parameters())]
        kept += [optimizer.state[one]["momentum_buffer"] for one in model.parameters()]
        before = [one.clone() for one in kept]
        optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(offload.BindingError, match=r"param_groups\[0\]\['momentum'\]"):
            run(*batch)
        assert all(map(torch.equal, kept, before))
        optimizer.param_groups[0]["momentum"] = 0.9
        run(*batch)
    assert not torch.equal(kept[0], before[0])


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW, fused"])
def test_what_is_done_between_steps_is_seen(computing, optimizer):
    """Checkpoints, moving averages and gradients that the user removes, as in eager."""
    if computing.records() == "npu" and optimizer != "SGD":
        pytest.skip(_NOT_ON_NPU)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    expected = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[optimizer](one.parameters()) for one in (model, expected))
    step, eager = plain(model, ours), plain(expected, theirs)
    batches = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(9)]
    step(*batches[0])
    captured = offload.capture(step, *batches[0], training=True)
    eager(*batches[0]), eager(*batches[0])
    with captured.load(device=computing.name) as run:
        pairs = ((model, ours, run), (expected, theirs, eager))
        saved = [copy.deepcopy((one.state_dict(), of.state_dict())) for one, of, _ in pairs]
        for at, batch in enumerate(batches):
            for (one, of, execute), state in zip(pairs, saved, strict=True):
                if at == 3:
                    one.load_state_dict(state[0])
                    of.load_state_dict(copy.deepcopy(state[1]))
                elif at == 5:
                    of.zero_grad(set_to_none=True)
                elif at == 7:
                    with torch.no_grad():
                        for weight in one.parameters():
                            weight.lerp_(torch.ones_like(weight), 0.25)
                execute(*batch)
            check_same(model, ours, expected, theirs)
