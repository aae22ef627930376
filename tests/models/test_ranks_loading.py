"""Ways to load programs with collectives, and what their executions leave: on two ranks."""

from __future__ import annotations

import pytest
from ranks import Found, run_by_torchrun


@pytest.fixture(scope="module")
def found() -> Found:
    """What two ranks found in all cases."""
    return run_by_torchrun("rank_loading_cases", 2)


def test_kernels_stand_between_collectives(found):
    for rank in found.of("fused"):
        assert rank["same"] == rank["same unfused"] == [True] * 5
        assert rank["failed"] == 0
        assert rank["names"] == [
            *("kernel", "all_reduce", "kernel", "wait_tensor", "kernel", "all_reduce_"),
            *("kernel", "wait_tensor", "kernel"),
        ]


def test_the_host_may_deliver_launches(found):
    assert found.of("by_the_host") == [[True] * 4] * 2


def test_collectives_run_on_one_lane(found):
    for rank in found.of("on_lanes"):
        kind, message = rank["several"]
        assert kind == "BindingError"
        assert "lanes=2: the program exchanges tensors with other ranks" in message
        assert "start collectives in one order" in rank["refusal"]
        assert rank["explained"]
        assert rank["same"]


def test_what_one_rank_would_decide_is_refused(found):
    for refused, works in found.of("refused"):
        kinds, messages = zip(*refused, strict=True)
        assert kinds == (*["BindingError"] * 5, "CaptureError", "DiagnosisError")
        for option, message in zip(
            ("weights_budget=0", "weights_budget='1MiB'", "weights_budget='auto'", "fuse='auto'"),
            messages,
            strict=False,
        ):
            assert option in message
            assert "exchanges tensors with other ranks" in message
        assert "dynamic_shapes=" in messages[4]
        assert "sizes cannot vary where ranks exchange tensors" in messages[5]
        assert "exchanges tensors with other ranks" in messages[6]
        assert works


def test_weights_may_be_in_files(found):
    assert found.of("weights_in_files") == [True, True]


def test_nothing_grows(found):
    for rank in found.of("nothing_grows"):
        assert (rank["tensors"], rank["works"]) == (0, 0)
        assert rank["bytes"] < 2**22  # the results alone are more than 2**24


def test_results_are_the_callers(found):
    assert found.of("results_are_kept") == [[True] * 12] * 2


def test_closing_waits_for_the_other_rank(found):
    assert found.of("closed_while_one_is_queued") == [True, True]


def test_two_groups_may_be_used_at_once(found):
    assert found.of("two_groups_on_two_threads") == [[200, True]] * 2


def test_a_forked_process_is_told(found):
    for said, goes_on in found.of("forked"):
        assert said.startswith("ExecutionError|")
        assert "of the process that this one was forked from" in said
        assert goes_on


@pytest.mark.parametrize("case", ["dtypes", "layouts"])
def test_what_eager_exchanges_executions_do(found, case):
    for rank in found.of(case):
        for what, (raises, refused, same) in rank.items():
            expected = (True, "ExecutionError", []) if raises else (False, "", [True])
            assert (raises, refused, same) == expected, what


def test_columns_are_written_and_nothing_beside_them(found):
    assert found.of("columns_in_place") == [True, True]
