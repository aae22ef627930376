"""Slices of Programs: executed in order they have the whole Program's effect."""

import pytest
import torch
from checks import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from on_lanes import Towers
from placed import execute_slices, slices_at_random, viewed
from random_programs import RETURNED, STEP_LISTS, RandomProgram

import offload
from offload.api.captured import Captured
from offload.errors import ProgramError
from offload.program import Role
from offload.program.slice import slice_program
from offload.program.structure import unflatten


def executed(bound, slices, *args):
    program = bound.program
    tensors = {view.value: one for view, one in zip(program.inputs, args, strict=True)}
    for value, held in bound.bindings.weights.items():
        tensors[value] = held[0]
    tensors = execute_slices(Captured, slices, tensors)
    results = [viewed(program, one, tensors) for one in program.results]
    return unflatten(bound.result_structure, results)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=STEP_LISTS,
    returned=RETURNED,
    seed=st.integers(0, 10**6),
    n_processors=st.integers(1, 3),
    is_local=st.booleans(),
)
@torch.no_grad()
def test_slices_at_random(steps, returned, seed, n_processors, is_local):
    """Views, writes and draws in any order: results, inputs, weights and the generator's state."""
    torch.manual_seed(len(steps))
    model = RandomProgram(steps, returned, is_local)
    x, y = normal(4, 4), normal(4, 4)
    captured = offload.capture(model, x.clone(), y.clone())
    slices = slices_at_random(captured.bound, seed, n_processors)
    assert sum(len(one.bound.program.launches) for one in slices) == len(captured.program.launches)
    kept = [model.state.clone(), model.weight.clone()]
    generator = torch.get_rng_state()
    outcomes = []
    for is_whole in (True, False):
        model.state.copy_(kept[0])
        model.weight.copy_(kept[1])
        torch.set_rng_state(generator)
        args = x.clone(), y.clone()
        results = model(*args) if is_whole else executed(captured.bound, slices, *args)
        outcomes.append([*results, *args, model.state.clone(), model.weight.clone()])
        outcomes[-1].append(torch.get_rng_state())
    assert all(map(torch.equal, *outcomes))


@torch.no_grad()
def test_what_crosses():
    model, x = Towers(16, 2), torch.randn(4, 16)
    captured = offload.capture(model, x)
    program = captured.program
    half = len(program.launches) // 2
    first = slice_program(captured.bound, range(half))
    second = slice_program(captured.bound, range(half, len(program.launches)))
    assert set(second.inputs) - {program.inputs[0].value} == set(first.outputs)
    assert second.outputs == (program.results[0].view.value,)
    n_weights = [len(one.bound.program.of_role(Role.WEIGHT)) for one in (first, second)]
    assert sum(n_weights) == len(program.of_role(Role.WEIGHT))


@torch.no_grad()
def test_what_does_not_divide_is_refused():
    def write(x):
        y = x + 1
        z = y.sin()
        y.mul_(2)
        return y + z

    captured = offload.capture(write, torch.randn(4))
    names = [one.name for one in captured.program.launches]
    at = names.index("aten::mul_.Tensor")
    with pytest.raises(ProgramError, match="is written by launches of both sides"):
        slice_program(captured.bound, range(at))
    for launches in ([], [1, 0], [0, 0]):
        with pytest.raises(ProgramError, match="expected indices of launches in order"):
            slice_program(captured.bound, launches)
