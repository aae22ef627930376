"""Orders of ranks in a training step: the checker refuses every wrong one."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_steps import (
    changed,
    cut,
    is_end,
    left_out,
    moved_behind_everything,
    moved_to_the_front,
    recorded,
)

import offload
from offload.errors import PlanError
from offload.plan.check_rank_orders import check_rank_orders
from offload.plan.rank_orders import RankStep, Work
from offload.plan.schedules import Schedule
from offload.program.step_parts import Phase


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
        "sends rank 0|waits forever|has not started",
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

    with pytest.raises(PlanError, match="waits forever"):
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
