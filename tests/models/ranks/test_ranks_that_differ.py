"""Ranks that load stages of other training steps, of other weights, or in other places."""

from __future__ import annotations

import pytest
from ranks import Found, run_alone

pytestmark = pytest.mark.slow

PAIR = ("other_launches", "refused_on_one_rank", "other_weights", "other_stages")


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of two ranks."""
    return run_alone("differing_stage_cases", 2, *PAIR)[0]


def test_ranks_that_recorded_other_launches_are_told_the_first(found):
    ranks = found.of("other_launches")
    for optimizers, rates in ranks:
        for kind, message in (optimizers, rates):
            assert kind == "CaptureError"
            assert "ranks [1] have recorded another program than rank 0" in message
            assert "the same model, optimizer and hyperparameters" in message
        assert "staged_training.py:" in rates[1]
    assert {"1.1" in rates[1] for _, rates in ranks} == {True, False}  # each has its own launch


def test_a_request_that_one_rank_refuses_is_refused_on_all_at_once(found):
    (kind, message, at_once), last = found.of("refused_on_one_rank")
    assert kind == "CaptureError"
    assert "rank 1 refused the pipeline" in message
    assert "1F1B" in message
    assert at_once
    assert last[0] == "BindingError"


def test_ranks_with_other_weights_are_refused(found):
    for of_rank in found.of("other_weights"):
        assert of_rank.keys() == {"seeds", "draws", "batches", "evaluated"}
        for kind, message in of_rank.values():
            assert kind == "CaptureError"
            assert "ranks [1] hold other content than rank 0" in message
            assert "the same seed on all ranks" in message


def test_no_stage_uses_what_another_executable_has_written_elsewhere(found):
    for number, of_rank in enumerate(found.of("other_stages")):
        assert [kind for kind, _ in of_rank["refused"]] == ["BindingError"] * 3
        kind, message = of_rank["evaluated"]
        assert kind in {"", "BindingError"}  # where its stages begin alike, it is right
        for message in [told for _, told in of_rank["refused"]]:
            assert "gather_state()" in message
        assert of_rank["wrong"] == []
        assert of_rank["results"] == (number == 1)


def test_a_refusal_in_a_group_concerns_that_group_alone():
    results, codes = run_alone("differing_stage_cases", 4, "refused_in_a_part")
    assert codes == [0] * 4
    assert results.of("refused_in_a_part") == [
        ["BindingError", "BindingError", "", ""],
        ["CaptureError", "CaptureError", "", ""],
        ["CaptureError", ""],
        ["CaptureError", ""],
    ]
