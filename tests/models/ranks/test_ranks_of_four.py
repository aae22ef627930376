"""Four ranks: groups of some of them, and sums over more than two."""

from __future__ import annotations

import pytest
from ranks import Found, run_by_torchrun


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of four ranks in all cases."""
    return run_by_torchrun("four_rank_cases", 4)


@pytest.mark.slow
def test_a_model_may_be_split_in_one_direction_and_replicated_in_the_other(found):
    for number, rank in enumerate(found.of("split_both_ways")):
        assert rank["rank"] == number
        assert rank["same"]
        assert rank["launches"].count("all_reduce") == 2


def test_sums_are_added_in_the_order_of_eager(found):
    for rank in found.of("collectives_of_four"):
        assert [one["same"] for one in rank] == [True] * 3


def test_a_program_knows_its_group(found):
    assert found.of("groups_of_a_program") == [
        [[0, 2], 0, 4],
        [[1, 3], 1, 4],
        [[0, 2], 2, 4],
        [[1, 3], 3, 4],
    ]
