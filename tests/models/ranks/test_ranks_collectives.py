"""Collectives as launches: two ranks record them, and execute them with eager's bits."""

from __future__ import annotations

import pytest
import torch
from ranks import Found, run_by_torchrun

BEFORE_2_13 = torch.__version__ < "2.13"


def needs_2_13(what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(BEFORE_2_13, reason=f"needs torch 2.13 {what}")


NEEDS_MESSAGES = needs_2_13("for the operators isend and irecv")


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of two ranks in all cases."""
    return run_by_torchrun("collective_rank_cases", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "launches"),
    [
        ("functional_all_reduce", ["all_reduce", "wait_tensor"]),
        ("functional_all_gather", ["all_gather_into_tensor", "wait_tensor"]),
        ("functional_all_gather_of_columns", ["all_gather_into_tensor", "wait_tensor"]),
        ("functional_reduce_scatter", ["reduce_scatter_tensor", "wait_tensor"]),
        (
            "operators_of_parts",
            [
                *("all_gather_into_tensor", "wait_tensor", "reduce_scatter_tensor", "wait_tensor"),
                *("all_gather_into_tensor_out", "wait_tensor"),
            ],
        ),
        ("functional_broadcast", ["broadcast", "wait_tensor"]),
        ("functional_all_to_all", ["all_to_all_single", "wait_tensor"]),
        ("functional_maximum_of_integers", ["all_reduce", "wait_tensor"]),
        ("coalesced", ["all_reduce_coalesced", "wait_tensor", "wait_tensor"]),
        pytest.param(
            "gathered_coalesced",
            ["all_gather_into_tensor_coalesced"] * 2 + ["wait_tensor"] * 4,
            marks=needs_2_13("to gather tensors with gaps together"),
        ),
        (
            "gathered_coalesced_of_two_dtypes",
            ["all_gather_into_tensor_coalesced", "wait_tensor", "wait_tensor"],
        ),
        ("in_place_all_reduce", ["all_reduce_", "wait_tensor"]),
        ("in_place_of_an_input", ["all_reduce_", "wait_tensor"]),
        ("in_place_broadcast", ["broadcast_", "wait_tensor"]),
        ("lists_gathered", ["all_gather_into_tensor", "wait_tensor"]),
        ("gathered_into", ["all_gather_into_tensor_out", "wait_tensor"]),
        ("scattered_into", ["reduce_scatter_tensor_out", "wait_tensor"]),
        ("lists_scattered", ["reduce_scatter_tensor", "wait_tensor"]),
        ("all_to_all_into", ["all_to_all_single", "wait_tensor"]),
        pytest.param(
            "messages", ["isend", "irecv", "wait_tensor", "wait_tensor"], marks=NEEDS_MESSAGES
        ),
        ("parts_in_place", ["all_reduce_", "broadcast_", "wait_tensor", "wait_tensor"]),
        (
            "gathered_into_a_part",
            [
                "all_gather_into_tensor_out",
                "reduce_scatter_tensor_out",
                "wait_tensor",
                "wait_tensor",
            ],
        ),
        pytest.param(
            "halos",
            ["irecv", "irecv", "isend", "isend", *["wait_tensor"] * 4],
            marks=NEEDS_MESSAGES,
        ),
        (
            "written_while_it_is_summed",
            ["all_reduce", "all_reduce_", "wait_tensor", "wait_tensor"],
        ),
        ("alone_in_a_group", ["all_gather_into_tensor", "wait_tensor"]),
        ("complex_numbers", ["all_reduce", "wait_tensor"]),
    ],
)
def test_bits_are_those_of_eager(found, case, launches):
    for rank in found.of(case):
        assert rank["same"]
        collectives = [one for one in rank["launches"] if one in {*launches, "wait_tensor"}]
        assert collectives == launches


@pytest.mark.parametrize("case", ["overlapped", "in_place_asynchronous"])
def test_what_is_computed_meanwhile_stands_between_start_and_wait(found, case):
    for rank in found.of(case):
        assert rank["same"]
        start = next(at for at, one in enumerate(rank["launches"]) if one.startswith("all_reduce"))
        assert rank["launches"].index("wait_tensor") > start + 1


@NEEDS_MESSAGES
def test_ranks_may_do_the_two_sides_of_a_message(found):
    sends, receives = found.of("one_way_messages")
    assert sends["same"]
    assert receives["same"]
    assert sends["launches"] == ["relu", "isend", "wait_tensor"]
    assert receives["launches"][:2] == ["irecv", "wait_tensor"]


@pytest.mark.skipif(not BEFORE_2_13, reason="torch has operators for messages")
def test_messages_without_operators_are_refused(found):
    expected = "CaptureError: .*has no operator _c10d_functional::isend.*use torch 2.13 or later"
    for case in ("messages", "one_way_messages"):
        with pytest.raises(AssertionError, match=expected):
            found.of(case)


def test_a_rank_that_executes_meets_a_rank_that_runs_eagerly(found):
    assert found.of("an_execution_meets_an_eager_call") == [{"same": True}] * 2


@needs_2_13("for new_group(sort_ranks=)")
def test_a_group_of_its_own_has_its_own_numbers(found):
    first, second = found.of("a_group_of_its_own")
    assert first["same"]
    assert second["same"]
    assert (first["rank"], second["rank"]) == (1, 0)


def test_an_execution_that_fails_leaves_the_ranks_in_step(found):
    case = "a_launch_that_fails_while_a_collective_is_under_way"
    assert found.of(case) == [[[True] * 20, True], [[], True]]


def test_many_executions_and_tickets(found):
    assert found.of("many_executions") == [[True, 0], [True, 0]]
    assert found.of("tickets") == [True, True]
