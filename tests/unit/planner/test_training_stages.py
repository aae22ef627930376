"""Training steps in stages: schedules, blocks, orders of ranks, and launches by tensor."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_steps import LINK, N_LAYERS, ONE_BY_ONE, Residual, cut, recorded

import offload
from offload.errors import PlanError, ProgramError
from offload.plan.rank_programs import training_rank
from offload.plan.schedules import Pass, Schedule, passes_of, simulated_ns
from offload.plan.step_blocks import step_blocks
from offload.plan.training_stages import TrainingStages, cut_training
from offload.program import Group, Role
from offload.program.per_tensor import merges, n_tensors, of_tensors
from offload.program.step_parts import Phase, step_parts

stages_and_batches = {"n_stages": st.integers(1, 8), "n_micro_batches": st.integers(1, 12)}


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
