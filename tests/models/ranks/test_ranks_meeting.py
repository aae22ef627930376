"""Refusals reach all ranks of a work, in whatever groups they are, and no other ranks."""

from __future__ import annotations

import pytest
from ranks import Found, run_by_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.long]

_BY_RANK_1 = "CaptureError: rank 1 refused the capture of call"


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of four ranks in all cases; a wait for the timeout is an error in them."""
    return run_by_torchrun("meeting_rank_cases", 4)


@pytest.mark.parametrize("case", ["recorded_alone_before", "refused_by_a_rank_two_groups_away"])
def test_all_ranks_refuse_what_one_does_and_record_what_comes_next(found, case):
    for rank, (refused, recorded) in enumerate(found.of(case)):
        if rank == 1:
            assert "reads a tensor's value on the host" in refused
        else:
            assert refused.startswith(_BY_RANK_1)
        assert recorded == ""


def test_ranks_record_what_has_nothing_to_do_with_a_refusal(found):
    first, *_ = zip(*found.of("refused_in_a_group_of_some"), strict=True)
    assert first[0].startswith(_BY_RANK_1)
    assert "reads a tensor's value on the host" in first[1]
    assert first[2:] == ("not called", "not called")
    assert [recorded for _, recorded in found.of("refused_in_a_group_of_some")] == [""] * 4


def test_a_refusal_in_one_group_is_none_of_another_recording(found):
    zero, one, two, three = found.of("refused_beside_another_recording")
    assert two["first"].startswith(_BY_RANK_1)
    assert "reads a tensor's value on the host" in one["first"]
    assert zero["second"] == one["second"] == ""
    assert three == {}


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_message_whose_peer_refuses_is_left_and_its_group_carries_none(found, refusing):
    """The sender refuses, then the receiver; the other one has begun the message."""
    cases = [outcomes[5 * refusing :][:5] for outcomes in found.of("refused_before_a_message")[:2]]
    own, other = cases[refusing], cases[1 - refusing]
    assert "reads a tensor's value on the host" in own[0]
    assert other[0].startswith(f"CaptureError: rank {refusing} refused the capture of call")
    left = "this rank has begun a message in an earlier capture"
    assert own[1].startswith(f"CaptureError: rank {1 - refusing} refused the capture of call")
    assert left in other[1]
    for loaded in own[2:4]:  # it had begun its message meanwhile
        assert left in loaded
    for loaded in other[2:4]:
        assert left in loaded
    assert own[4] == other[4] == ""


def test_a_refusal_at_another_line_is_believed_if_the_rank_does_not_come(found):
    first, *others = found.of("refused_at_another_line")
    assert "reads a tensor's value on the host" in first[0]
    for one in others:
        assert one[0].startswith("CaptureError: rank 0 refused the capture of at_other_lines_0")
    assert [one[1] for one in (first, *others)] == [""] * 4


def test_options_and_groups_that_one_rank_refuses_no_rank_loads(found):
    for rank, (groups, again, budget, last) in enumerate(found.of("refused_at_the_load")):
        kind = "BindingError: " if rank == 1 else "CaptureError: rank 1 refused the load of call"
        assert groups.startswith(kind)
        assert "none is called '7'" in groups
        assert budget.startswith(kind)
        assert "weights_budget=1000" in budget
        assert again == last == ""


def test_of_random_works_all_ranks_refuse_what_one_refuses(found):
    for wrong, n_refused in found.of("random_works"):
        assert wrong == []
        assert n_refused > 20


def test_of_several_works_from_one_line_a_refusal_concerns_one(found):
    for rank, (first, *others) in enumerate(found.of("refused_in_a_loop")):
        assert ("reads a tensor's value on the host" in first) == (rank == 1)
        assert others == ["", ""]


def test_a_rank_that_has_recorded_more_often_believes_a_refusal(found):
    for rank, (first, refused, last) in enumerate(found.of("recorded_more_often")):
        told = "rank 1 refused the capture of repeated" if rank != 1 else "on the host"
        assert told in refused
        assert first == last == ""


def test_works_leave_no_more_words_in_the_store(found):
    for _, *numbers in found.of("words_in_the_store"):
        assert len(set(numbers)) == 1


def test_groups_that_are_made_again_know_nothing_of_earlier_ones_of_their_name(found):
    zero, *others = found.of("groups_made_again")
    assert zero[0].startswith("ExecutionError: no message for 1 s, the timeout of group '1'")
    assert [zero[1:], *others] == [[""] * 4, [""] * 2, [""] * 2, []]
