"""Training steps in stages: schedules, blocks, orders of ranks, and the checker of orders."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from offload.errors import PlanError, ProgramError
from offload.interpreter.torch_names import find_overload, positional_and_named, torch_object
from offload.plan.check_rank_orders import check_rank_orders
from offload.plan.rank_orders import Exchange, RankOrder, RankStep, Work
from offload.plan.rank_programs import training_rank
from offload.plan.schedules import Pass, Schedule, passes_of, simulated_ns
from offload.plan.step_blocks import step_blocks
from offload.plan.topology import Link
from offload.plan.training_stages import TrainingStages, cut_training
from offload.program import Group, Operator, Role, Symbol
from offload.program.per_tensor import merges, n_tensors, of_tensors
from offload.program.step_draws import (
    GENERATOR_STATE_BYTES,
    GET_STATE,
    SET_STATE,
    drawn_by_shape,
)
from offload.program.step_parts import Phase, step_parts

N_LAYERS = 4
LINK = Link(bytes_per_second=1e9, overhead_ns=500.0)
ONE_BY_ONE = Schedule.ONE_FORWARD_ONE_BACKWARD

stages_and_batches = {"n_stages": st.integers(1, 8), "n_micro_batches": st.integers(1, 12)}


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


# ---- schedules -----------------------------------------------------------------------------------


@given(schedule=st.sampled_from(Schedule), **stages_and_batches)
def test_each_stage_runs_each_pass_once_and_in_order(schedule, n_stages, n_micro_batches):
    for stage in range(n_stages):
        passes = passes_of(schedule, n_stages, n_micro_batches, stage)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            numbers = [one.micro_batch for one in passes if one.phase is phase]
            assert numbers == list(range(n_micro_batches))
        in_flight, most = 0, 0
        for one in passes:
            in_flight += 1 if one.phase is Phase.FORWARD else -1
            most = max(most, in_flight)
            assert in_flight >= 0
        expected = min(n_stages - stage, n_micro_batches)
        assert most == (n_micro_batches if schedule is Schedule.GPIPE else expected)


@given(schedule=st.sampled_from(Schedule), **stages_and_batches)
def test_equal_costs_have_the_known_bubble(schedule, n_stages, n_micro_batches):
    forward, backward, update = 3.0, 5.0, 2.0
    predicted = simulated_ns(
        schedule,
        n_micro_batches,
        [forward] * n_stages,
        [backward] * n_stages,
        [update] * n_stages,
    )
    slots = n_micro_batches + n_stages - 1
    assert predicted == pytest.approx(slots * (forward + backward) + update)


@given(
    schedule=st.sampled_from(Schedule),
    n_micro_batches=st.integers(1, 8),
    costs=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=6),
)
def test_predictions_are_those_of_a_virtual_clock(schedule, n_micro_batches, costs):
    n_stages = len(costs)
    orders = [passes_of(schedule, n_stages, n_micro_batches, one) for one in range(n_stages)]
    ended: dict[tuple[int, Pass], float] = {}
    clocks, at = [0.0] * n_stages, [0] * n_stages
    while any(at[stage] < len(orders[stage]) for stage in range(n_stages)):
        moved = False
        for stage, order in enumerate(orders):
            if at[stage] == len(order):
                continue
            one = order[at[stage]]
            is_forward = one.phase is Phase.FORWARD
            other = stage - 1 if is_forward else stage + 1
            if 0 <= other < n_stages and (other, one) not in ended:
                continue
            begin = max(clocks[stage], ended.get((other, one), 0.0))
            clocks[stage] = ended[stage, one] = begin + costs[stage][0 if is_forward else 1]
            at[stage] += 1
            moved = True
        assert moved
    predicted = simulated_ns(
        schedule, n_micro_batches, [float(f) for f, _ in costs], [float(b) for _, b in costs]
    )
    assert predicted == pytest.approx(max(clocks))


# ---- orders of ranks -----------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    n_stages=st.integers(1, N_LAYERS),
    n_micro_batches=st.sampled_from((1, 2, 3, 5)),
    schedule=st.sampled_from(Schedule),
    seed=st.integers(0, 10**6),
)
def test_orders_compute_the_step_and_keep_few_micro_batches(
    n_stages, n_micro_batches, schedule, seed
):
    captured = recorded(n_micro_batches)
    program = captured.program
    stages = cut(captured, n_stages, schedule, seed)  # proved by the checker
    assert stages.n_micro_batches == n_micro_batches
    for number, memory in enumerate(stages.memory):
        expected = min(n_stages - number, n_micro_batches)
        assert memory.micro_batches == (n_micro_batches if schedule is Schedule.GPIPE else expected)
    written = {value for value in program.written_values if is_weight(program, value)}
    assert stages.keepers.keys() == written
    sent, received = Counter(), Counter()
    for number, order in enumerate(stages.orders):
        group = Group("0", tuple(range(n_stages)), number, n_stages)
        part = training_rank(
            captured.bound, order, number, n_stages, group if n_stages > 1 else None
        )
        own = part.program
        assert len(own.inputs) == (len(program.inputs) if number == 0 else 0)
        assert len(own.results) == (len(program.results) if number == n_stages - 1 else 0)
        held = {one.index for one in own.of_role(Role.WEIGHT)}
        assert set(part.bindings.weights) == held
        for launch in own.launches:
            if launch.name.endswith("isend"):
                sent[(number, *launch.arguments[1:3])] += 1
            elif launch.name.endswith("irecv"):
                received[(launch.arguments[1], number, launch.arguments[2])] += 1
    assert sent == received
    assert set(sent.values()) <= {1}


def is_weight(program: offload.Program, value: int) -> bool:
    return program.values[value].role is Role.WEIGHT


@pytest.mark.parametrize("n_micro_batches", [1, 3, 5])
def test_gradients_are_added_in_recorded_order(n_micro_batches):
    captured = recorded(n_micro_batches)
    for n_stages, schedule in itertools.product((2, 4), Schedule):
        for order in cut(captured, n_stages, schedule).orders:
            added = [one for one in order.works if one.phase is not Phase.FORWARD]
            for value in {value for one in added for value in one.launch.writes}:
                indices = [one.launch.index for one in added if value in one.launch.writes]
                assert indices == sorted(indices)


def test_each_parameter_is_kept_with_its_gradient_and_state():
    captured = recorded(3)
    step = step_parts(captured.program)
    blocks = step_blocks(step)
    assert step.n_micro_batches == 3
    assert blocks.n_blocks == N_LAYERS
    names = {one.index: one.name for one in captured.program.values}
    for value, block in blocks.homes.items():
        assert f"layers.{block}." in names[value]
    assert len(blocks.homes) == 2 * N_LAYERS * 4  # parameter, gradient, both moments


def test_stages_begin_where_the_caller_says():
    captured = recorded(2)
    weights = {one.name: one.index for one in captured.program.of_role(Role.WEIGHT)}
    launch_ns = [1.0] * len(captured.program.launches)

    def given_cut(*names: str) -> TrainingStages:
        begins = [[weights[name]] for name in names]
        return cut_training(
            captured.program, launch_ns, LINK, len(begins) + 1, schedule=ONE_BY_ONE, begins=begins
        )

    stages = given_cut("model.layers.1.weight", "model.layers.3.bias")
    for name, value in weights.items():
        if name.startswith("model.layers."):
            layer = int(name.split(".")[2])
            assert stages.keepers[value] == (layer >= 1) + (layer >= 3)
    with pytest.raises(PlanError, match=r"begins\[1\].*layers.1.weight first where stage 1 begins"):
        given_cut("model.layers.3.weight", "model.layers.1.weight")
    with pytest.raises(PlanError, match=r"begins\[0\].*layers.0.weight first where stage 0 begins"):
        given_cut("model.layers.0.weight")
    with pytest.raises(PlanError, match="no forward pass uses"):
        given_cut("the gradient of model.layers.1.weight")


# ---- the checker ---------------------------------------------------------------------------------


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


def receives_swapped(steps: list[RankStep]) -> None:
    starts = [at for at, one in enumerate(steps) if is_end(one, sends=False, waits=False)]
    one, other = starts[0], starts[1]
    steps[one], steps[other] = steps[other], steps[one]


WRONG = {
    "a launch twice": (0, lambda steps: steps.append(steps[-1]), "twice|would find"),
    "no update": (
        0,
        left_out(lambda one: isinstance(one, Work) and one.phase is Phase.UPDATE),
        "would find|no rank runs|does not run",
    ),
    "an update first": (
        0,
        moved_to_the_front(
            lambda one: (
                isinstance(one, Work) and one.phase is Phase.UPDATE and "zero_" in one.launch.name
            )
        ),
        "would find|precedes the guard",
    ),
    "received too late": (
        1,
        moved_behind_everything(lambda one: is_end(one, sends=False, waits=True)),
        "while it is exchanged|would find",
    ),
    "sent before it is made": (
        1,
        moved_to_the_front(lambda one: is_end(one, sends=True, waits=False)),
        "would find|precedes the guard",
    ),
    "sent last": (
        1,
        moved_behind_everything(lambda one: is_end(one, sends=True, waits=False)),
        "sends rank 0|waits for ever|has not started",
    ),
    "receives in another order": (1, receives_swapped, "which receives"),
    "not waited for": (
        1,
        left_out(lambda one: is_end(one, sends=True, waits=True)),
        "do not wait for each message",
    ),
    "never received": (
        1,
        left_out(lambda one: is_end(one, sends=False, waits=False)),
        "which receives|has not started",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("n_micro_batches", [1, 3])
def test_the_checker_refuses(name, n_micro_batches):
    rank, change, match = WRONG[name]
    stages = cut(recorded(n_micro_batches), 2)
    program = recorded(n_micro_batches).program
    check_rank_orders(program, stages.orders)
    with pytest.raises(PlanError, match=match):
        check_rank_orders(program, changed(stages, rank, change))


def test_ranks_that_wait_for_one_another_are_found():
    stages = cut(recorded(2), 2)
    program = recorded(2).program

    def change(steps: list[RankStep]) -> None:
        """Wait for the second gradient before the second activations are sent."""
        sent = [at for at, one in enumerate(steps) if is_end(one, sends=True, waits=False)]
        last = steps.pop(sent[-1])
        waits = [at for at, one in enumerate(steps) if is_end(one, sends=False, waits=True)]
        steps.insert(waits[-1] + 1, last)

    with pytest.raises(PlanError, match="waits for ever"):
        check_rank_orders(program, changed(stages, 0, change))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), n_stages=st.integers(2, 4))
def test_swaps_of_dependent_steps_are_refused(seed, n_stages):
    """Two steps in a row that touch the same memory, one writing, may not be swapped."""
    draws = random.Random(seed)
    captured = recorded(3)
    stages = cut(captured, n_stages, draws.choice(list(Schedule)))
    rank = draws.randrange(n_stages)
    steps = stages.orders[rank].steps
    pairs = [
        at
        for at, (one, other) in enumerate(itertools.pairwise(steps))
        if isinstance(one, Work) and isinstance(other, Work) and depends(captured, one, other)
    ]
    at = draws.choice(pairs)

    def change(found: list[RankStep]) -> None:
        found[at], found[at + 1] = found[at + 1], found[at]

    with pytest.raises(PlanError):
        check_rank_orders(captured.program, changed(stages, rank, change))


def depends(captured: offload.Captured, one: Work, other: Work) -> bool:
    return not set(one.launch.writes).isdisjoint(other.launch.touched()) or not set(
        other.launch.writes
    ).isdisjoint(one.launch.touched())


# ---- random numbers ------------------------------------------------------------------------------


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


# ---- launches by tensor --------------------------------------------------------------------------


def test_launches_of_lists_are_divided_by_tensor():
    program = recorded(5).program  # AdamW, foreach
    divided = [one for one in program.launches if n_tensors(one) > 1]
    assert {one.name.partition(".")[0] for one in divided} >= {
        "aten::_foreach_lerp_", "aten::_foreach_addcdiv_", "aten::_foreach_sqrt",
        "aten::_foreach_zero_", "aten::_foreach_norm",
    }  # fmt: skip
    for launch in divided:
        n = n_tensors(launch)
        parts = [of_tensors(launch, (at,)) for at in range(n)]
        assert Counter(v for one in parts for v in one.writes) == Counter(launch.writes)
        assert {v for one in parts for v in one.reads} == set(launch.reads)
        assert [v for one in parts for v in one.made()] == list(launch.made())
        if merges(launch):
            assert of_tensors(launch, range(n)) is launch
            assert set(of_tensors(launch, (0, n - 1)).writes) == {
                *parts[0].writes,
                *parts[-1].writes,
            }


# ---- refusals ------------------------------------------------------------------------------------


def test_what_cannot_be_divided_is_told():
    writing = offload.capture(lambda x: x.add_(1), torch.ones(3))
    with pytest.raises(ProgramError, match="no backward pass"):
        step_parts(writing.program)
    with pytest.raises(PlanError, match="at least 5 launches"):
        cut(recorded(2), 5)


def test_an_update_of_weights_of_several_stages_in_one_launch_is_refused():
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, *_, last = (layer.bias for layer in model.layers)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch.aminmax(model.layers[0].weight, dim=0, out=(first, last))
        return loss.detach()

    captured = offload.capture(step, torch.randn(3, 8), training=True)
    with pytest.raises(PlanError, match="weights of several stages at once"):
        cut(captured, 2)


def test_the_check_of_a_scaler_is_one_launch_for_each_gradient():
    torch.manual_seed(0)
    model = Residual()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    captured = offload.capture(step, torch.randn(3, 8), training=True)
    divided = step_parts(captured.program)
    checks = [one for one in divided.program.launches if "non_finite" in one.name]
    assert len(checks) == 2 * N_LAYERS
    (recorded_check,) = [one for one in captured.program.launches if "non_finite" in one.name]
    assert {divided.recorded[one.index] for one in checks} == {recorded_check.index}
    assert {value for one in checks for value in one.writes} == set(recorded_check.writes)
    assert {value for one in checks for value in one.reads} == set(recorded_check.reads)
    stages = cut(captured, 2)
    assert sum(stages.stage_ns) == pytest.approx(stages.sequential_ns)
