"""A training step in stages: each rank loads one, and micro-batches pass through all of them."""

from __future__ import annotations

import pytest
from ranks import Found, run_alone, run_by_torchrun

pytestmark = pytest.mark.slow

SCHEDULES = {"1F1B", "GPipe"}


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of two ranks in all cases."""
    return run_by_torchrun("training_stage_rank_cases", 2)


def check_bits(ranks: list[dict[str, dict[str, dict[str, object]]]]) -> None:
    """Check that all ranks have the bits of one process, each with its part of the state."""
    for key in ranks[0]:
        assert ranks[0][key].keys() == SCHEDULES
        for schedule in SCHEDULES:
            cases = [rank[key][schedule] for rank in ranks]
            for case in cases:
                assert case["wrong"] == [], (key, schedule)
                assert case["explained"]
                assert case["n_own"] > 0
                assert case["launches"] == cases[0]["launches"]
            # Each weight that the step writes has one keeper.
            assert sum(case["n_own"] for case in cases) == cases[0]["n_written"]
            # Apart from numbers, such as step counters, each is on one rank alone.
            whole, shared = cases[0]["whole_bytes"], cases[0]["shared_bytes"]
            held = [case["weight_bytes"] for case in cases]
            assert whole - shared <= sum(held) <= whole + (len(cases) - 1) * shared
            assert max(held) < whole


@pytest.mark.parametrize(
    "case",
    [
        "bits",
        "clipped",
        "running_statistics",
        "of_gpt",
        "with_dropout",
        "with_scaler",
    ],
)
def test_steps_have_the_bits_of_one_process(found, case):
    check_bits(found.of(case))


def check_draws(ranks: list[dict[str, dict[str, dict[str, object]]]]) -> None:
    """Check that each rank draws all numbers, and says so."""
    for key, of_schedule in ranks[0].items():
        for case in of_schedule.values():
            assert len(set(case["n_draws"])) == 1
            assert case["n_draws"][0] > 4 * int(key.rpartition(", ")[2])
            assert case["explained_draws"]


def test_each_rank_draws_all_random_numbers(found):
    check_draws(found.of("with_dropout"))


def test_a_stage_keeps_as_many_micro_batches_as_its_schedule_says(found):
    for key, of_schedule in found.of_rank(0, "bits").items():
        n_micro_batches = int(key.rpartition(", ")[2])
        assert of_schedule["GPipe"]["memory"] == [n_micro_batches] * 2
        assert of_schedule["1F1B"]["memory"] == [min(2, n_micro_batches), 1]


def test_stages_begin_where_the_caller_says(found):
    assert found.of("given_cut") == [["0"], ["2", "4", "6"]]


def test_refusals_say_what_to_do(found):
    for number, (refused, is_last, has_result) in enumerate(found.of("refused")):
        assert is_last == has_result == (number == 1)
        kinds = {name: kind for name, (kind, _) in refused.items()}
        assert kinds.pop("small") == "PlanError"
        assert kinds == dict.fromkeys(kinds, "BindingError")
        messages = {name: message for name, (_, message) in refused.items()}
        assert "bernoulli draws random numbers beside a tensor" in messages["random"]
        assert "torch.rand_like(x)" in messages["random"]
        assert "at least 2 launches" in messages["small"]
        assert "expected 2 or None, got 3" in messages["number"]
        assert "1F1B" in messages["schedule"]
        assert "modules or tensors" in messages["begins"]
        assert "uses no tensor" in messages["foreign"]
        assert "expected a list" in messages["no list"]
        assert "without lanes=" in messages["lanes"]
        if number:
            assert "takes no arguments" in messages["arguments"]
        else:
            assert "expected" in messages["arguments"]


def test_ranks_with_other_steps_are_refused(found):
    for kind, message in found.of("other_steps"):
        assert kind == "CaptureError"
        assert "a training step of" in message


def test_four_ranks_have_the_bits_of_one_process():
    results, codes = run_alone(
        "training_stage_rank_cases", 4, "clipped", "of_gpt", "given_cut", "with_dropout"
    )
    assert codes == [0] * 4
    check_bits(results.of("clipped"))
    check_bits(results.of("of_gpt"))
    check_bits(results.of("with_dropout"))
    check_draws(results.of("with_dropout"))
    assert results.of("given_cut") == [["0"], ["2"], ["4"], ["6"]]
    for of_schedule in results.of_rank(0, "clipped").values():
        assert of_schedule["1F1B"]["memory"] == [4, 3, 2, 1]


def test_a_rank_that_ends_is_an_error_on_the_others():
    results, codes = run_alone("training_stage_rank_cases", 2, "killed")
    kind, _ = results.of_rank(0, "killed")
    assert kind == "ExecutionError"
    assert codes[1] == -9


def test_a_rank_that_hangs_is_an_error_after_the_timeout():
    (kind, message), last = run_alone("training_stage_rank_cases", 2, "hung")[0].of("hung")
    assert last is None
    assert kind == "ExecutionError"
    assert "irecv" in message or "isend" in message or "wait_tensor" in message


def test_no_step_follows_one_that_failed_in_the_middle():
    """Messages of a later step would be taken for those that it still owes."""
    found = run_alone("training_stage_rank_cases", 2, "failing_in_the_middle")[0]
    for told in found.of("failing_in_the_middle"):
        assert [kind for kind, _ in told] == ["", "ExecutionError", "ExecutionError"]
        assert "an earlier call ended in execution 0" in told[2][1]
    assert "out of range" in found.of_rank(0, "failing_in_the_middle")[1][1]
