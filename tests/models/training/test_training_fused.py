"""Training steps with compiled kernels: near eager, with the same tensors written."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import Batch, Side, captured_step, simple_step, twins

import offload
from models import Block
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.program import Kernel

pytestmark = pytest.mark.slow

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

N_STEPS = 12


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory) -> None:
    """A folder for the caches of this module."""
    folder = tmp_path_factory.getbasetemp() / "training_fused"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), *between, nn.GELU(), nn.Linear(32, 4))


def batches() -> list[Batch]:
    return [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(3)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def mse_step(model, optimizer):
    return simple_step(model, optimizer, F.mse_loss)


def kept(side: Side) -> dict[str, object]:
    """All that a step leaves, and which tensors hold gradients."""
    found = {name: copy.deepcopy(one) for name, one in side.named()}
    grads = {f"id {name}": id(one.grad) for name, one in side.model.named_parameters()}
    return found | grads


def assert_kept(side: Side, before: dict[str, object]) -> None:
    for name, one in kept(side).items():
        same = torch.equal(one, before[name]) if torch.is_tensor(one) else one == before[name]
        assert same, name


def assert_near(ours: Side, eager: Side) -> None:
    got, expected = dict(ours.named()), dict(eager.named())
    assert got.keys() == expected.keys()
    for name, one in expected.items():
        if torch.is_tensor(one) and one.is_floating_point():
            torch.testing.assert_close(got[name], one, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(got[name], one) if torch.is_tensor(one) else got[name] == one


def check(model, optimizer, make_step, given, *, fuse=True) -> offload.Executable:
    ours, eager = twins(model, optimizer, make_step)
    captured = ours.call(captured_step, ours.step, *given[0])
    eager.call(eager.step, *given[0])
    before = kept(ours)
    run = captured.load(fuse=fuse)
    assert_kept(ours, before)
    for number in range(N_STEPS):
        batch = given[number % len(given)]
        got, expected = ours.call(run, *batch), eager.call(eager.step, *batch)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert_near(ours, eager)
    return run


def n_kernels(run: offload.Executable) -> int:
    return sum(isinstance(launch.callee, Kernel) for launch in run.program.launches)


@pytest.mark.parametrize("fuse", [True, "auto"])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_small_nets(optimizer, fuse):
    run = check(mlp(nn.BatchNorm1d(32), nn.Dropout(0.2)), optimizer, mse_step, batches(), fuse=fuse)
    if fuse is True:
        assert n_kernels(run)
    assert not any(one.failure for one in run.fusion.proofs)


def test_gpt_blocks():
    given = [(torch.randn(2, 8, 32), torch.randn(2, 8, 32)) for _ in range(3)]
    run = check(nn.Sequential(Block(32, 4), Block(32, 4)), sgd, mse_step, given)
    assert n_kernels(run)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(20, dtype=torch.long))

    def forward(self, x):
        self.count.index_add_(0, x.flatten(), torch.ones_like(x.flatten()))
        return self.head(torch.tanh(self.embed(x)).mean(1))


def written_between(model, optimizer):
    """A weight is written through a view, and read again in the same step."""

    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        with torch.no_grad():
            model.head.weight[:4].mul_(0.9)
            model.head.weight.data[5] = model.head.weight.data[6] * 0.5
        more = F.mse_loss(model(x), target)
        (model.head.weight[3:9].square().sum() + more).backward()
        optimizer.step()
        with torch.no_grad():
            model.embed.weight.clamp_(-1.0, 1.0)
        return loss.detach() + more.detach()

    return step


def test_weights_that_are_written_through_views_of_them():
    given = [(torch.randint(20, (6, 5)), torch.randn(6, 20)) for _ in range(3)]
    for make in (sgd, adamw):
        run = check(Tied(), make, written_between, given)
        assert n_kernels(run)


def accumulated(model, optimizer):
    def step(x, target):
        for number in range(2):
            loss = F.mse_loss(model(x[number::2]), target[number::2])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("drops", [False, True])
def test_what_is_found_at_the_load_is_left_as_it_was(drops):
    """Trials of kernels write gradients and state, which are restored; dropped ones stay None."""
    ours, eager = twins(mlp(), sgd, accumulated)
    given = batches()
    captured = captured_step(ours.step, *given[0])
    eager.step(*given[0])
    if drops:
        for side in (ours, eager):
            side.optimizer.zero_grad()
    before = kept(ours)
    run = captured.load(fuse="auto")
    assert_kept(ours, before)
    for batch in given:
        torch.testing.assert_close(run(*batch), eager.step(*batch), rtol=1e-4, atol=1e-5)
        assert_near(ours, eager)


def test_what_is_changed_between_steps_is_compared_as_ever():
    ours, eager = twins(mlp(), adamw, mse_step)
    given = batches()
    run = captured_step(ours.step, *given[0]).load(fuse=True)
    eager.step(*given[0])
    ours.model.eval()
    with pytest.raises(offload.BindingError, match="expected training=True"):
        run(*given[0])
    ours.model.train()
    for side in (ours, eager):
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
        for one in side.model.parameters():
            one.data.mul_(1.5)  # which torch does not count
    for batch in given:
        torch.testing.assert_close(run(*batch), eager.step(*batch), rtol=1e-4, atol=1e-5)
    ours.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(offload.BindingError, match=r"\['lr'\]: expected 0\.001"):
        run(*given[0])
