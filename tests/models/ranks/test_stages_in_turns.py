"""Steps of many kinds in stages, in one process: bits of results and of all state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from stages_in_turns import Alone, StagesInTurns
from step_kinds import KINDS, Overflowing, inputs_of, layers, loss_of, sgd, usual

import offload
from offload.errors import PlanError, ProgramError
from offload.interpreter.eager_run import bytes_of
from offload.plan.schedules import Schedule
from offload.plan.step_blocks import step_blocks
from offload.program.step_parts import step_parts


def test_gradients_of_one_stage_overflow():
    """Otherwise the steps with a scaler would not show that all stages skip the update."""
    torch.manual_seed(0)
    model = Overflowing()
    for seed in (1, 2):
        model.zero_grad()
        (x, target) = (one[-1] for one in inputs_of(seed, 3))
        (loss_of(model(x), target, 3) * 2.0**16).backward()
        assert bool(model.first.weight.grad.isfinite().all()) == (seed == 1)
        assert all(one.grad.isfinite().all() for one in model.others.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("n_micro_batches", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_steps_have_the_bits_of_one_rank(name, n_micro_batches):
    step, n_found = KINDS[name](n_micro_batches)
    captured = offload.capture(step, *inputs_of(0, n_micro_batches), training=True)
    draws = random.Random(name)
    for n_stages in (2, 4):
        for schedule in Schedule:
            launch_ns = [float(draws.randint(100, 2000)) for _ in captured.program.launches]
            alone = Alone(captured)
            if n_stages > step_blocks(step_parts(captured.program)).n_blocks:
                assert name.startswith("frozen")
                with pytest.raises(PlanError, match="at least"):
                    StagesInTurns(captured, n_stages, schedule, launch_ns)
                continue
            ours = StagesInTurns(captured, n_stages, schedule, launch_ns)
            assert ours.stages.n_micro_batches == n_found
            for seed in range(1, 4):
                batch = inputs_of(seed, n_micro_batches)
                given = [one.untyped_storage() for one in batch]
                for rank, other in enumerate([alone.rank, *ours.ranks]):
                    other.seed(seed if rank < 2 else 100 + rank)  # others follow the first
                expected, got = alone(given), ours(given)
                states = alone.rank.generator_states()
                for rank in ours.ranks:
                    for one, other in zip(rank.generator_states(), states, strict=True):
                        assert not captured.program.is_random or torch.equal(one, other)
                for one, other in zip(got, expected, strict=True):
                    assert torch.equal(one, other), (n_stages, schedule, seed)
                kept = ours.contents()
                written = {
                    value
                    for value in captured.program.written_values
                    if value in captured.bound.bindings.weights
                }
                assert kept.keys() == written
                for value, content in kept.items():
                    whole = bytes_of(alone.rank.weights[value])
                    assert torch.equal(content, whole), captured.program.values[value].name


def test_random_numbers_beside_a_tensor_of_one_rank_are_refused():
    model = layers()

    def call(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y * torch.bernoulli(torch.sigmoid(y.detach()))

    call.parameters = model.parameters  # type: ignore[attr-defined]
    captured = offload.capture(usual(call, sgd(model), 2), *inputs_of(0, 2), training=True)  # type: ignore[arg-type]
    launch_ns = [1.0] * len(captured.program.launches)
    with pytest.raises(ProgramError, match="bernoulli draws random numbers beside a tensor"):
        StagesInTurns(captured, 2, Schedule.GPIPE, launch_ns)


def test_an_optimizer_that_steps_between_micro_batches_is_refused():
    model = layers()
    optimizer = sgd(model)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        loss: Any = 0
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            one = loss_of(model(x), target, 2)
            one.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            loss += one.detach()
        return loss

    captured = offload.capture(step, *inputs_of(0, 2), training=True)
    launch_ns = [1.0] * len(captured.program.launches)
    with pytest.raises(ProgramError, match=r"SGD.step.*between backward passes"):
        StagesInTurns(captured, 2, Schedule.GPIPE, launch_ns)
