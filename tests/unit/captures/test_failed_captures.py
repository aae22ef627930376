"""Messages about failed torch_npu captures, derived from torch's message alone."""

from __future__ import annotations

import pytest
from small_programs import added

from offload.backends.ascend.failed_captures import check_streams, unjoined_advice
from offload.errors import OutOfStreams

LAUNCHES = [added(line) for line in (1, 2)]
UNJOINED = RuntimeError("AclmdlRICaptureEnd failed, error code is 107025")


@pytest.mark.parametrize(
    ("n_tasks", "begins"),
    [
        ([[0], [1], [2, 1]], [0, 1, None]),
        # With copies of weights there is a moment before each launch and one after it.
        ([[0], [1], [1], [2, 1, 1]], [0, None, 1, None]),
    ],
    ids=["launches alone", "beside copies"],
)
def test_the_launch_that_forks_is_named(n_tasks: list[list[int]], begins: list[int | None]) -> None:
    advice = unjoined_advice(UNJOINED, LAUNCHES, n_tasks, begins)
    assert "Side streams begin in model.py:2: aten::add.Tensor" in advice
    assert "model.py:1" not in advice


def test_a_stream_that_copies_begin_is_of_no_launch() -> None:
    n_tasks, begins = [[0], [1], [1, 2], [2, 2]], [0, None, 1, None]
    assert "in some of the launches" in unjoined_advice(UNJOINED, LAUNCHES, n_tasks, begins)


def test_a_runtime_that_tells_no_tasks_names_no_launch() -> None:
    assert "in some of the launches" in unjoined_advice(UNJOINED, LAUNCHES, [], [])


def test_other_failures_get_no_such_advice() -> None:
    error = RuntimeError("AclmdlRICaptureEnd failed, error code is 507903")
    assert unjoined_advice(error, LAUNCHES, [[0], [1, 1]], [0, None]) == ""


@pytest.mark.parametrize("code", [207008, 207005])
def test_streams_that_ran_out_are_an_error_of_their_own(code: int) -> None:
    with pytest.raises(OutOfStreams, match=f"capturing: .*{code}.*close other models"):
        check_streams(RuntimeError(f"aclrtCreateStream failed, error code is {code}"), "capturing")


def test_other_codes_are_not() -> None:
    check_streams(UNJOINED, "capturing")
