"""`Executable.map`: results in order, errors in place, and bounded work in flight."""

from __future__ import annotations

import pytest
import torch
from task_callables import Refused

import offload
from offload.run import Ticket


def test_map_raises_in_place_and_cancels_the_rest(run):
    results = run.map([torch.zeros(4), torch.ones(4), torch.zeros(5), torch.zeros(4)])
    assert torch.equal(next(results), torch.ones(4))
    with pytest.raises(offload.BindingError, match="expected float32"):
        list(results)
    assert list(results) == []


def test_map_gives_results_before_what_the_batches_raise(run):
    def batches():
        yield torch.zeros(4)
        yield torch.ones(4)
        raise Refused

    results, got = run.map(batches(), buffersize=5), []
    with pytest.raises(Refused):
        got.extend(results)
    assert [one[0].item() for one in got] == [1.0, 2.0]


def test_map_cancels_what_has_not_begun_when_it_is_left():
    ended = Ticket()
    run = offload.capture(lambda x: x + 1, torch.zeros(4)).load()
    results = run.map([torch.zeros(4), ended, ended], buffersize=3)
    assert torch.equal(next(results), torch.ones(4))
    results.close()
    ended._set_result(torch.zeros(4))
    run(torch.zeros(4))
    assert run.last_execution.n_executions == 2


@pytest.mark.parametrize("buffersize", [1, 2, 5])
def test_buffers_that_batches_fill_again(run, buffersize):
    """One more than may be in flight are enough."""
    buffers = [torch.empty(4) for _ in range(buffersize + 1)]

    def batches():
        for number in range(200):
            yield buffers[number % len(buffers)].fill_(number)

    for number, y in enumerate(run.map(batches(), buffersize=buffersize)):
        assert torch.equal(y, torch.full((4,), number + 1.0))


def test_map_is_bounded_by_bytes(run):
    taken = 0

    def batches():
        nonlocal taken
        for number in range(1, 9):
            taken = number
            yield torch.zeros(4)

    for number, _ in enumerate(run.map(batches(), buffersize=8, buffer_bytes=64), 1):
        assert taken - number <= 2  # two batches of 32 bytes, and the next one
    assert number == 8


def test_map_of_nothing(run):
    assert list(run.map([])) == []
    with pytest.raises(offload.BindingError, match="buffersize: expected an integer"):
        run.map([], buffersize=0)


def test_map_over_sizes():
    n = offload.Dim("n", max=64) if hasattr(offload, "Dim") else torch.export.Dim("n", max=64)
    captured = offload.capture(lambda x: x.sum(0), torch.zeros(3, 4), dynamic_shapes=({0: n},))
    run = captured.load(sizes=offload.Sizes())
    batches = [torch.ones(rows, 4) for rows in (3, 7, 2, 64)]
    assert [one[0].item() for one in run.map(batches)] == [3.0, 7.0, 2.0, 64.0]
    ticket = run.submit(run.submit(torch.ones(5, 4)).result().expand(6, 4).contiguous())
    assert ticket.result()[0].item() == 30.0
