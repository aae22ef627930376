"""Feature maps on lanes are at most 1.1 times a solver's result under a long time limit."""

from __future__ import annotations

import itertools

import pytest
import torch
from on_lanes import Experts, Towers, on_lanes, programs
from ortools.sat.python import cp_model

import offload
from lane_models import Heads, Recommending
from offload.plan import SlotKind

_SECONDS = 4.0  # the solver's deterministic time


def smallest_arena_bytes(run: offload.Executable, at_most_bytes: int) -> int:
    """A solver's best result for Values that may exist at once."""
    plan, unit = run.plan, run.plan.alignment_bytes
    placed = [
        (plan.lifetimes[value.index], -(-value.size_bytes // unit))
        for value, place in zip(run.program.values, plan.places, strict=True)
        if place is not None and plan.slots[place.slot].kind is SlotKind.FEATURE_MAP
    ]
    model = cp_model.CpModel()
    most = at_most_bytes // unit
    arena = model.new_int_var(plan.lower_bound_bytes // unit, most, "")
    begins = [model.new_int_var(0, most, "") for _ in placed]
    for begin, (_, size) in zip(begins, placed, strict=True):
        model.add(begin + size <= arena)
    for (one, (first, size)), (other, (second, width)) in itertools.combinations(
        zip(begins, placed, strict=True), 2
    ):
        if first.precedes(second) or second.precedes(first):
            continue
        below = model.new_bool_var("")
        model.add(one + size <= other).only_enforce_if(below)
        model.add(other + width <= one).only_enforce_if(~below)
    model.minimize(arena)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = _SECONDS
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return round(solver.objective_value) * unit


PROGRAMS = {
    **programs(),
    "wide towers": (Towers(32, 6, 4), [(torch.randn(4, 32),)]),
    "six experts": (Experts(16, 6, 1), [(torch.randn(6, 16),)]),
    "six heads": (Heads(48, 6), [(torch.randn(2, 7, 48),)]),
    "nine tables": (
        Recommending(9, 50, 8),
        [(torch.randn(5, 13), torch.randint(0, 50, (5, 9)))],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_arenas_are_small(name):
    model, calls = PROGRAMS[name]
    run = on_lanes(offload.capture(model.eval(), *calls[0]).bound, 2)
    assert len(run.plan.lanes) == 2
    arena_bytes = run.plan.feature_map_bytes
    assert arena_bytes <= 1.1 * smallest_arena_bytes(run, arena_bytes)


def test_there_are_ten():
    assert len(PROGRAMS) == 10
