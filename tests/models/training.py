"""Helpers of the tests of training steps: a captured step against the same step in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload

Batch = tuple[torch.Tensor, ...]
Step = Callable[..., Any]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

N_STEPS = 20

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    kind = _INTEGERS[one.element_size()]
    pair = (each.detach().contiguous().view(kind) for each in (one, other))
    return torch.equal(*pair)


def simple_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Step) -> Step:
    """The usual body of a training loop."""

    def step(x, target):
        optimizer.zero_grad()
        loss = loss_fn(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def adding_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step that does not set gradients to zero."""

    def step(x, target):
        loss = functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mse_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return simple_step(model, optimizer, functional.mse_loss)


def mlp(*between: nn.Module) -> nn.Module:
    """A small net, with modules between its layers."""
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 4))


def batch() -> Batch:
    """An input and a target of `mlp`."""
    return torch.randn(4, 8), torch.randn(4, 4)


def batches(n: int = 3) -> list[Batch]:
    return [batch() for _ in range(n)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def captured_step(step: Step, *batch: torch.Tensor) -> offload.Captured:
    captured = offload.capture(step, *batch, training=True)
    assert isinstance(captured, offload.Captured)
    return captured


def refusal(step: Step, *given: torch.Tensor, training: bool = True) -> str:
    """The message of the CaptureError for a step, by default on a `batch`."""
    with pytest.raises(offload.CaptureError) as caught:
        offload.capture(step, *(given or batch()), training=training)
    return str(caught.value)


class Side:
    """A twin: a model, its optimizer and a step, with a separate random generator."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step
        self.generator_state = torch.get_rng_state()

    def call(self, function: Step, *args: Any) -> Any:
        before = torch.get_rng_state()
        torch.set_rng_state(self.generator_state)
        try:
            return function(*args)
        finally:
            self.generator_state = torch.get_rng_state()
            torch.set_rng_state(before)

    def named(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """All state that a step leaves: parameters, buffers, gradients, the optimizer's state."""
        yield from self.model.state_dict().items()
        for name, one in self.model.named_parameters():
            yield f"{name}.grad", one.grad
            for key, item in self.optimizer.state.get(one, {}).items():
                for number, part in enumerate(item if isinstance(item, list) else [item]):
                    yield f"{name}: {key} {number}", part
        yield "generator", self.generator_state


def assert_alike(ours: Side, eager: Side) -> None:
    got, expected = dict(ours.named()), dict(eager.named())
    assert got.keys() == expected.keys()
    for name, item in expected.items():
        if isinstance(item, torch.Tensor):
            assert got[name] is not None, name
            assert same_bits(got[name], item), name
        else:
            assert got[name] == item, name


def twins(
    model: nn.Module, optimizer: MakeOptimizer, make_step: Callable[..., Step]
) -> tuple[Side, Side]:
    """The same model twice, each with its optimizer and step."""
    sides = []
    for one in (model, copy.deepcopy(model)):
        own = optimizer(one.parameters())
        sides.append(Side(one, own, make_step(one, own)))
    return sides[0], sides[1]


def check(
    model: nn.Module,
    optimizer: MakeOptimizer,
    make_step: Callable[..., Step],
    batches: Sequence[Batch],
    *,
    between: Callable[[Side, int], None] = lambda side, number: None,
    n_steps: int = N_STEPS,
    n_before: int = 0,
) -> offload.Captured:
    """Capture one step, execute the others, and compare with eager's bits after each.

    Args:
        model: what is trained.
        optimizer: makes an optimizer for parameters.
        make_step: makes the step of a model and its optimizer.
        batches: taken in turn.
        between: called on each side after a step, with the step's number.
        n_steps: number of steps.
        n_before: number of steps before the capture.
    """
    ours, eager = twins(model, optimizer, make_step)
    run: Any = ours.step
    captured: offload.Captured | None = None
    for number in range(n_steps):
        batch = batches[number % len(batches)]
        if number == n_before:
            captured = ours.call(captured_step, ours.step, *batch)
            got = captured.recorded_result
        else:
            got = ours.call(run, *batch)
        expected = eager.call(eager.step, *batch)
        for one, other in zip(_tensors(got), _tensors(expected), strict=True):
            assert same_bits(one, other), number
        assert_alike(ours, eager)
        for side in (ours, eager):
            side.call(between, side, number)
        if captured is not None and run is ours.step:
            run = captured.load()
    assert captured is not None
    assert run.last_execution.n_executions == n_steps - n_before - 1
    return captured


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


class Pair:
    """A captured step and the same step in eager, which must give the same."""

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[], Batch],
        make_step: Callable[[nn.Module, torch.optim.Optimizer], Step] = mse_step,
        optimizer: MakeOptimizer = adamw,
    ) -> None:
        self.ours, self.eager = twins(model, optimizer, make_step)
        self.batch = batch
        given = batch()
        self.captured = self.ours.call(captured_step, self.ours.step, *given)
        self.eager.call(self.eager.step, *given)
        self.run = self.captured.load()
        self.steps()

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.ours, self.eager

    def steps(self, n: int = 2) -> None:
        for _ in range(n):
            given = self.batch()
            got = self.ours.call(self.run, *given)
            assert torch.equal(got, self.eager.call(self.eager.step, *given))
            assert_alike(self.ours, self.eager)

    def refused(self, match: str) -> None:
        before = copy.deepcopy(dict(self.ours.named()))
        n_executions = self.run.last_execution.n_executions
        for call in (self.run, self.run.submit):
            with pytest.raises(offload.BindingError, match=match):
                call(*self.batch())
        assert self.run.last_execution.n_executions == n_executions
        for name, one in self.ours.named():
            assert not isinstance(one, torch.Tensor) or torch.equal(one, before[name]), name


class NormPair(Pair):
    """A pair whose model is an `mlp` with batch normalization."""

    def __init__(
        self,
        make_step: Callable[[nn.Module, torch.optim.Optimizer], Step] = mse_step,
        optimizer: MakeOptimizer = adamw,
    ) -> None:
        super().__init__(mlp(nn.BatchNorm1d(16)), batch, make_step, optimizer)
