"""A model in stages: each rank loads one, and micro-batches pass through all of them."""

from __future__ import annotations

import pytest
from ranks import Found, run_alone, run_by_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module", params=[2, 4])
def found(request) -> Found:
    """Results of two and four ranks in all cases."""
    return run_by_torchrun("stage_rank_cases", request.param)


def test_results_are_those_of_one_process(found):
    ranks = found.of("bits")
    for number, rank in enumerate(ranks):
        is_last = number == len(ranks) - 1
        assert rank["kinds"] == (["list"] if is_last else ["NoneType"])
        assert len(rank["same"]) == is_last * 2 * 3 * 4 * 5
        assert all(rank["same"])
        assert rank["explained"]
        assert rank["launches"] == ranks[0]["launches"]
        assert sum(rank["launches"]) == rank["n_launches"]
        assert min(rank["launches"]) > 0
        assert (rank["receives"] > 0) == (number > 0)
        assert (rank["sends"] > 0) == (not is_last)
    assert sum(rank["sends"] for rank in ranks) == sum(rank["receives"] for rank in ranks)


def test_each_rank_has_the_weights_of_its_stage(found):
    ranks = found.of("bits")
    whole = ranks[0]["whole_bytes"]
    # Each weight is on one rank. Where the cut lies is measured: a stage may have no weight.
    assert sum(rank["weight_bytes"] for rank in ranks) == whole


def test_of_weights_in_files_each_rank_reads_its_own(found):
    ranks = found.of("weights_in_files")
    assert [one[0] for one in ranks] == [[]] * (len(ranks) - 1) + [[True, True]]
    assert sum(one[1] for one in ranks) == ranks[0][2] == 16


def test_refusals_say_what_to_do(found):
    for number, (refused, n_results) in enumerate(found.of("refused")):
        kinds = {name: kind for name, (kind, _) in refused.items()}
        # All ranks find it; one may learn first that another has refused.
        assert kinds.pop("too small") in ("PlanError", "CaptureError")
        assert kinds == dict.fromkeys(kinds, "BindingError")
        messages = {name: message for name, (_, message) in refused.items()}
        assert "writes inputs or weights" in messages["writing"]
        assert "torch.distributed.pipelining" in messages["writing"]
        assert "no backward pass" in messages["begins"]
        assert "random numbers" in messages["random"]
        assert "stages" in messages["too small"]
        assert "micro_batches" in messages["none"]
        assert "offload.Pipeline" in messages["no pipeline"]
        assert "weights_budget" in messages["budget"]
        assert "argument scale is given by keyword alone" in messages["keyword"]
        if number == 0:
            assert "expected float32[64, 256], got float32[2]" in messages["a batch"]
            assert "expected 2 micro-batches" in messages["too few"]
            assert "requires gradients" in messages["gradients"]
        else:
            assert "takes no arguments" in messages["a batch"]
        assert n_results in (True, 2)


def test_ranks_with_other_programs_are_refused(found):
    for kind, message in found.of("other_programs"):
        assert kind == "CaptureError"
        assert "have recorded another program than rank" in message
        assert "aten::" in message


def test_a_rank_that_ends_is_an_error_on_the_others():
    found, codes = run_alone("stage_rank_cases", 2, "killed")
    kind, _ = found.of_rank(0, "killed")
    assert kind == "ExecutionError"
    assert codes[1] == -9


def test_no_call_follows_one_that_ended_in_the_middle():
    """Its messages would be taken for those that the ended call still owes."""
    first, second = run_alone("stage_rank_cases", 2, "failing_in_the_middle")[0].of(
        "failing_in_the_middle"
    )
    kinds = ["", "ExecutionError", "ExecutionError", "CaptureError"]
    assert [kind for kind, _ in first] == [kind for kind, _ in second] == kinds
    assert "out of range" in first[1][1]
    assert "an earlier call ended in execution 1" in first[2][1]
    assert "an earlier call ended in execution 1" in second[2][1]
    for *_, (_, loaded_again) in (first, second):
        assert "has begun a message in an earlier capture or call of stages" in loaded_again


def test_a_rank_that_hangs_is_an_error_after_the_timeout():
    first, (kind, message) = run_alone("stage_rank_cases", 2, "hung")[0].of("hung")
    assert first is None
    assert kind == "ExecutionError"
    assert "irecv" in message or "wait_tensor" in message
