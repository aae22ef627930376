"""A world of one rank, and programs of other worlds in it."""

from __future__ import annotations

import pytest
from ranks import Found, run_by_torchrun


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of one rank in all cases."""
    return run_by_torchrun("one_rank_cases", 1)


@pytest.mark.slow
def test_a_split_model_runs_alone(found):
    (rank,) = found.of("split_alone")
    assert rank["same"]


def test_weights_may_be_in_files(found):
    assert found.of("weights_in_files") == [True]


def test_programs_of_other_worlds_and_groups_are_refused_at_the_load(found):
    ((world, group),) = found.of("another_world")
    assert "recorded with group '0' of ranks 0, 1 (this is rank 0) of 2 in all" in world
    assert "this world has 1" in world
    assert "there is no process group '7' here (there are '0')" in group
    assert "load(groups={'7': group})" in group
