"""Random numbers of training steps in stages: each rank draws all of them in recorded order."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest
import torch
from staged_steps import (
    N_LAYERS,
    captured_step,
    changed,
    cut,
    first,
    is_end,
    left_out,
    moved_behind_everything,
)
from torch import nn

import offload
from offload.errors import PlanError, ProgramError
from offload.interpreter.torch_names import find_overload, positional_and_named, torch_object
from offload.plan.check_rank_orders import check_rank_orders
from offload.plan.rank_orders import RankStep, Work
from offload.plan.schedules import Schedule
from offload.program import Operator, Symbol
from offload.program.step_draws import (
    GENERATOR_STATE_BYTES,
    GET_STATE,
    SET_STATE,
    drawn_by_shape,
)
from offload.program.step_parts import Phase, step_parts


class Dropping(nn.Module):
    """Layers with dropout; the first mask is used by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(N_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rand(8)
        torch.randperm(3)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x) * scale, 0.3) + 0.1 * torch.randn_like(x)
        return x


@functools.cache
def drawing(n_micro_batches: int) -> offload.Captured:
    return captured_step(n_micro_batches, model=Dropping())


def draws(work: RankStep) -> bool:
    return isinstance(work, Work) and work.launch.random


@pytest.mark.parametrize("n_micro_batches", [1, 2, 5])
@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_each_rank_draws_all_numbers_in_recorded_order(n_stages, schedule, n_micro_batches):
    captured = drawing(n_micro_batches)
    stages = cut(captured, n_stages, schedule)  # proved by the checker
    n_draws, n_used = n_micro_batches * (2 + 2 * N_LAYERS), 0
    assert sum(one.random for one in captured.program.launches) == n_draws
    for order, memory in zip(stages.orders, stages.memory, strict=True):
        drawn = [one.launch for one in order.works if one.launch.random]
        assert [one.index for one in drawn] == [
            one.index for one in stages.program.launches if one.random
        ]
        assert drawn[0].name == SET_STATE
        assert len(drawn) == 1 + n_draws
        # Memory of numbers that a rank does not use is free behind their launch.
        used = {
            holding
            for one in order.works
            if not one.launch.random
            for holding in one.operands.values()
            if one.launch.name != "aten::div_.Scalar"
        }
        n_steps = Counter(holding for one in order.works for holding in one.operands.values())
        masks = [
            holding
            for one in order.works
            if one.launch.name == "aten::bernoulli_.float"
            for holding in one.operands.values()
        ]
        n_used += sum(one in used for one in masks)
        assert all(n_steps[one] == 1 for one in masks if one not in used)
        assert memory.micro_batches <= n_micro_batches
    assert n_used == n_micro_batches * N_LAYERS  # each mask on one rank
    sent = [
        one.message
        for order in stages.orders
        for one in order.steps
        if is_end(one, sends=True, waits=False)
    ]
    states = [one for one in sent if stages.program.values[one.value].size_bytes == 5056]
    assert [(one.sender, one.receiver) for one in states] == [
        (0, rank) for rank in range(1, n_stages)
    ]


def swapped_draws(steps: list[RankStep]) -> None:
    one, other = [at for at, step in enumerate(steps) if draws(step)][1:3]
    steps[one], steps[other] = steps[other], steps[one]


def is_discarded(step: RankStep) -> bool:
    return isinstance(step, Work) and step.launch.name == "aten::randperm"


def given_by_the_second_rank(steps: list[RankStep]) -> None:
    """The second rank gives the state of its own generator, too."""
    at = first(steps, lambda one: isinstance(one, Work) and one.launch.name == SET_STATE)
    work = steps[at]
    assert isinstance(work, Work)
    state = work.launch.arguments[0]
    given = dataclasses.replace(
        work.launch,
        index=0,
        callee=Operator(GET_STATE),
        reads=(),
        writes=(state.value,),
        random=False,
    )
    steps.insert(at, dataclasses.replace(work, launch=given))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (swapped_draws, "rank 1 draws from generator 0"),
        (left_out(is_discarded), "rank 1 draws from generator 0"),
        (left_out(lambda one: draws(one) and one.launch.name == SET_STATE), "rank 1 draws"),
        (lambda steps: steps.insert(0, steps[first(steps, is_discarded)]), "twice on rank 1"),
        (moved_behind_everything(draws), "rank 1 draws from generator 0"),
        (given_by_the_second_rank, "rank 1 gives the state"),
    ],
)
def test_the_checker_refuses_other_draws(change, match):
    stages = cut(drawing(3), 2)
    check_rank_orders(stages.program, stages.orders)
    with pytest.raises(PlanError, match=match):
        check_rank_orders(stages.program, changed(stages, 1, change))


def test_draws_follow_a_schedule_that_has_another_order_of_passes():
    """Draws of a backward pass come before those of the next forward pass, as recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(N_LAYERS)))

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand(8)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(xs: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for x in xs.unbind(0):
            y = nn.functional.dropout(model(x), 0.5)
            y.register_hook(hook)
            one = y.square().mean()
            one.backward()
            loss += one.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    captured = offload.capture(step, torch.randn(3, 4, 8), training=True)
    phases = [part.phase for part in step_parts(captured.program).parts if part.launch.random]
    assert Phase.BACKWARD in phases
    for schedule in Schedule:
        cut(captured, 2, schedule)


LIKE = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randint_like, low": lambda x: torch.randint_like(x, -3, 7),
}


@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize("shape", [(5,), (4, 8), (3, 1, 20), (0, 3), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_like_a_tensor_are_those_of_its_shape(name, shape, dtype):
    captured = offload.capture(LIKE[name], torch.zeros(shape, dtype=dtype))
    (launch,) = captured.program.launches
    other = drawn_by_shape(launch)
    assert launch.name == f"aten::{name.partition(',')[0]}" + ".low_dtype" * ("low" in name)
    assert other.name == launch.name.replace("_like", "").replace("low_dtype", "low")
    assert other.reads == ()
    positional, named = positional_and_named(
        find_overload(other.name),
        [torch_object(one) if isinstance(one, Symbol) else one for one in other.arguments],
    )
    torch.manual_seed(5)
    expected, state = LIKE[name](torch.zeros(shape, dtype=dtype)), torch.get_rng_state()
    torch.manual_seed(5)
    got = find_overload(other.name)(*positional, **named)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_that_lie_in_another_order_stay_as_they_are():
    captured = offload.capture(torch.rand_like, torch.zeros(4, 8).t())
    (launch,) = captured.program.launches
    assert drawn_by_shape(launch) is launch


def test_the_state_of_a_generator_has_the_stated_size():
    assert torch.Generator().get_state().numel() == GENERATOR_STATE_BYTES


@pytest.mark.parametrize("offset", [0, 64, 100_000])
def test_operators_exchange_the_state_of_a_generator_with_any_memory(offset):
    memory = torch.zeros(offset + GENERATOR_STATE_BYTES, dtype=torch.uint8)
    state = memory[offset:]
    one, other = torch.Generator().manual_seed(4), torch.Generator().manual_seed(5)
    torch.randn(3, generator=one)  # keeps a number for the next call
    find_overload(GET_STATE)(state, generator=one)
    find_overload(SET_STATE)(state, generator=other)
    assert torch.equal(one.get_state(), other.get_state())
    assert torch.equal(torch.randn(9, generator=one), torch.randn(9, generator=other))
    with pytest.raises(RuntimeError, match="size"):
        find_overload(SET_STATE)(state[:-1], generator=other)


def test_draws_beside_a_tensor_of_one_rank_are_refused():
    class Sampling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.layers
            y = first(x)
            return second(y * torch.bernoulli(torch.sigmoid(y.detach())))

    with pytest.raises(ProgramError, match="bernoulli draws random numbers beside a tensor"):
        step_parts(captured_step(2, model=Sampling()).program)
