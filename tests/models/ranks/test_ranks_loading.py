"""Ways to load programs with collectives, and leftovers of their executions: on two ranks."""

from __future__ import annotations

import pytest
import torch
from rank_loading_cases import OFFSET_NS
from ranks import Found, run_by_torchrun


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of two ranks in all cases."""
    return run_by_torchrun("rank_loading_cases", 2)


@pytest.mark.slow
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


def test_collectives_have_a_lane_beside_launches(found):
    ranks = found.of("on_lanes")
    refused = {
        "more": "lanes=3: the program exchanges tensors with other ranks",
        "host": "the host delivers launches",
    }
    for case, why in refused.items():
        kinds = {rank[case][0] for rank in ranks}
        # A rank may learn that the other refuses before it has looked itself.
        assert "BindingError" in kinds <= {"BindingError", "CaptureError"}
        assert all(why in rank[case][1] for rank in ranks)
    for rank in ranks:
        assert rank["asked"] == [None, 2, "auto"]
        assert rank["kept"][0] is None
        assert rank["lanes"] == [["launches", "collectives"]] * 3
        assert rank["measured"]
        assert rank["explained"]
        assert rank["same"] == [True] * 3
    assert ranks[0]["decision"] == ranks[1]["decision"]


def test_torch_compile_traces_collectives(found):
    for rank in found.of("compiled"):
        names = ("summed", "summed_in_place", "asynchronous")
        assert rank == {name: [True] * 3 for name in names}


def test_collectives_start_early_and_are_waited_for_late(found):
    for rank in found.of("moved_launches"):
        assert rank["same"]
        assert sorted(rank["names"]) == sorted(rank["recorded"])
        started = [at for at, one in enumerate(rank["names"]) if one == "all_reduce"]
        waits = [at for at, one in enumerate(rank["names"]) if one == "wait_tensor"]
        assert started[0] == 0
        assert waits[0] > started[0] + 1
        assert rank["bytes"][0] == rank["bytes"][1]
        assert rank["collectives"] == [["collectives", at] for at in started]
        assert all(rank["ends"])


def test_timelines_of_ranks_are_on_one_axis(found):
    first, second = found.of("timelines_in_one_file")
    assert second == [None, None]
    assert first["offsets"][0] == first["errors"][0] == 0
    assert 0 < first["errors"][1] < 1e8
    assert abs(first["offsets"][1] - OFFSET_NS) <= first["errors"][1]
    # Processes of one machine have one clock.
    assert abs(first["offsets of one clock"][1]) <= first["errors of one clock"][1]

    trace = first["trace"]
    said = trace["clockAlignment"]["ranks"]
    assert [one["rank"] for one in said] == [0, 1]
    assert said[1]["error_ns"] == first["errors"][1]
    events = trace["traceEvents"]
    assert sum(one.get("cat") == "collective" for one in events) == 4
    exchanges = []  # by rank from the beginning of each start to the end of its wait
    for rank in (0, 1):
        launches = [one for one in events if one.get("cat") == "kernel" and one["pid"] == rank]
        starts = [one["ts"] for one in launches if one["name"].endswith("all_reduce")]
        waits = [one["ts"] + one["dur"] for one in launches if one["name"].endswith("wait_tensor")]
        exchanges.append(list(zip(sorted(starts), sorted(waits), strict=True)))
        assert len(starts) == 2
    for (begin, end), (other_begin, other_end) in zip(*exchanges, strict=True):
        # None ended before the other rank began to start it.
        assert max(begin, other_begin) <= min(end, other_end) + said[1]["error_ns"] / 1e3


def test_only_members_of_a_group_gather_timelines(found):
    ranks, (kind, message) = found.of("timelines_of_a_group")
    assert ranks == [0]
    assert kind == "ExecutionError"
    assert "rank 1 is not in the given group" in message


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


def test_one_thread_of_a_rank_loads_with_a_group_at_a_time(found):
    for rank in found.of("loaded_on_two_threads"):
        kind, message = rank["refused"]
        assert kind == "BindingError"
        assert "expected one load at a time that uses process group '0' on this rank" in message
        assert rank["same"] == [True] * 3


def test_a_forked_process_is_told(found):
    for said, goes_on in found.of("forked"):
        assert said.startswith("ExecutionError|")
        assert "belongs to the process that this one was forked from" in said
        assert goes_on


# Before torch 2.13 its functions refuse gaps: one in Python, before anything is recorded;
# others in the operator, which a Program gives a copy without gaps.
KINDS = (
    {"gathered columns": "AssertionError", "scattered columns": "", "exchanged columns": ""}
    if torch.__version__ < "2.13"
    else {}
)


@pytest.mark.parametrize("case", ["dtypes", "layouts"])
def test_what_eager_exchanges_executions_do(found, case):
    for rank in found.of(case):
        for what, (raises, refused, same) in rank.items():
            kind = KINDS.get(what, "ExecutionError")
            expected = (True, kind, []) if raises else (False, "", [True])
            assert (raises, refused, same) == expected, what


def test_columns_are_written_and_nothing_beside_them(found):
    assert found.of("columns_in_place") == [True, True]
