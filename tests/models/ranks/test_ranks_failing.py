"""Ranks that end, hang, refuse or differ: a typed error on the others, and no hang.

A rank waits at most its group's timeout; the processes end by themselves here, or the run fails.
"""

from __future__ import annotations

import re

import pytest
from ranks import Found, run_alone

pytestmark = [pytest.mark.slow, pytest.mark.long]

# These leave the groups unchanged, so that one run has all of them.
_WHOLE = (
    "refused",
    "refused_behind_the_call",
    "raised_by_the_model",
    "other_collectives",
    "another_program_at_the_load",
    "refused_at_the_load",
    "a_group_that_is_gone",
    "another_shape_on_one_rank",
    "a_guard_that_fails_on_one_rank",
    "other_lanes",
    "failing_while_orders_are_timed",
)


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of two ranks in the cases that leave their groups whole."""
    return run_alone("failing_rank_cases", 2, *_WHOLE)[0]


@pytest.mark.parametrize(
    ("case", "why"),
    [("refused", "reads a tensor's value on the host"), ("refused_behind_the_call", "kept")],
)
def test_what_one_rank_refuses_to_record_all_do(found, case, why):
    (first, again), (second, again_there) = found.of(case)
    assert first["kind"] == second["kind"] == "CaptureError"
    assert first["message"].startswith("rank 1 refused the capture of call, so that all ranks do")
    assert why in first["message"]
    assert why in second["message"]
    assert again == again_there == [5.0] * 4  # the next capture finds the groups unchanged


def test_an_error_of_the_model_on_one_rank_ends_the_capture_of_all(found):
    first, second = found.of("raised_by_the_model")
    assert first["kind"] == "CaptureError"
    assert "rank 1 refused the capture of call" in first["message"]
    assert "ValueError: no more data" in first["message"]
    assert (second["kind"], second["message"]) == ("ValueError", "no more data")


def test_ranks_that_record_other_collectives_say_both(found):
    for rank in found.of("other_collectives"):
        assert [one["kind"] for one in rank] == ["CaptureError"] * 3
        kinds, sizes, more = (one["message"] for one in rank)
        assert "'all_reduce sum of float32[4]'" in kinds
        assert "'all_gather_into_tensor 2 of float32[4]'" in kinds
        assert "'all_reduce sum of float32[5]'" in sizes
        assert "'the call is recorded'" in more


def test_programs_that_do_not_fit_are_refused_at_the_load(found):
    for rank, summed in found.of("another_program_at_the_load"):
        assert rank["kind"] == "CaptureError"
        assert "a program of 1 collectives" in rank["message"]
        assert "a program of 2 collectives" in rank["message"]
        assert summed == [5.0] * 4


def test_what_one_rank_cannot_load_no_rank_loads(found):
    first, second = found.of("refused_at_the_load")
    assert first["kind"] == "CaptureError"
    assert "rank 1 refused the load of call" in first["message"]
    assert second["kind"] == "BindingError"
    assert "another shape" in second["message"]


def test_a_group_that_was_destroyed_is_named(found):
    for rank in found.of("a_group_that_is_gone"):
        assert rank["kind"] == "ExecutionError"
        assert "the process group 1 was destroyed" in rank["message"]


def test_a_rank_that_ends_is_an_error_at_the_user_line_of_the_others():
    found, codes = run_alone("failing_rank_cases", 2, "killed")
    assert codes[0] == 0
    assert codes[1] < 0
    for one in found.of_rank(0, "killed"):
        assert one["kind"] == "ExecutionError"
        assert "failing_rank_cases.py:" in one["message"]
        assert "wait_tensor" in one["message"]


def test_a_rank_that_hangs_is_an_error_after_the_timeout():
    found, codes = run_alone("failing_rank_cases", 2, "hung")
    assert codes == [0, 0]
    (failed, other), _ = found.of("hung")
    assert failed["kind"] == "ExecutionError"
    assert "Timed out waiting 6000ms" in failed["message"]
    told = (
        r"all_reduce_? in process group '0', where this is number 0 of 2 ranks, failed after \d+ ms"
    )
    assert re.search(told, failed["message"])
    assert "make the groups again" in failed["message"]
    assert other == [1.0, 1.0, 1.0]  # work without other ranks continues


def test_a_rank_that_never_records_is_named():
    found, _ = run_alone("failing_rank_cases", 2, "late_at_the_recording")
    first, _ = found.of("late_at_the_recording")
    assert first["kind"] == "ExecutionError"
    assert "no message for 6 s, the timeout of group '0', from ranks [1]" in first["message"]


def test_executions_that_diverge_end_in_errors():
    found, codes = run_alone("failing_rank_cases", 2, "diverging_executions")
    assert codes == [0, 0]
    assert [one["kind"] for one in found.of("diverging_executions")] == ["ExecutionError"] * 2


@pytest.mark.parametrize(
    ("case", "why"),
    [("another_shape_on_one_rank", "shape"), ("a_guard_that_fails_on_one_rank", "read")],
)
def test_what_one_rank_refuses_to_execute_the_others_wait_for(found, case, why):
    first, second = found.of(case)
    assert first["kind"] == "ExecutionError"
    assert "Timed out waiting 3000ms" in first["message"]
    assert second["kind"] == "BindingError"
    assert why in second["message"]


def test_a_rank_that_ends_in_a_load_is_named():
    found, codes = run_alone("failing_rank_cases", 2, "killed_in_the_load")
    assert codes[1] < 0
    failed = found.of_rank(0, "killed_in_the_load")
    assert failed["kind"] == "ExecutionError"
    assert "no message for 6 s" in failed["message"]
    assert "from ranks [1]" in failed["message"]


def test_a_store_that_ends_in_a_load_is_an_error():
    found, codes = run_alone("failing_rank_cases", 2, "store_ended_in_the_load")
    assert codes[0] < 0
    failed = found.of_rank(1, "store_ended_in_the_load")
    assert failed["kind"] == "ExecutionError"
    assert "lost the store of torch.distributed" in failed["message"]


def test_an_error_of_one_rank_while_orders_are_timed_is_one_of_all(found):
    (first, again), (second, again_there) = found.of("failing_while_orders_are_timed")
    assert second["kind"] == "ExecutionError"
    assert "no memory is left" in second["message"]
    # Rank 0 waits in the exchange, or is told where they meet, if it comes there after the refusal.
    told = {"ExecutionError": "Timed out", "CaptureError": "rank 1 refused the load of call"}
    assert told[first["kind"]] in first["message"]
    assert again == again_there == [5.0] * 4


def test_a_rank_that_ends_while_orders_are_timed_is_an_error_at_once():
    found, codes = run_alone("failing_rank_cases", 2, "killed_while_orders_are_timed")
    first = found.of_rank(0, "killed_while_orders_are_timed")
    assert first["kind"] == "ExecutionError"
    assert codes[1] == -9


def test_ranks_that_ask_for_other_lanes_are_refused_at_once(found):
    for one, again in found.of("other_lanes"):
        assert one["kind"] == "CaptureError"
        assert "lanes='auto'" in one["message"]
        assert again == [5.0] * 4
