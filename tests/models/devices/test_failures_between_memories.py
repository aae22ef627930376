"""What fails between separate memories: copies, launches, room; the next execution is right."""

import threading

import pytest
import torch
from apart import all_ways, apart
from checks import normal
from copies import before_copies, fail_nth
from two_branches import TwoBranches

import offload
from offload.run import transfers


@pytest.mark.parametrize("nth", range(1, 5))
@torch.no_grad()
def test_a_copy_that_fails(nth):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1, 2: 1, 4: 1}) as run:
        with (
            before_copies(fail_nth(nth)),
            pytest.raises(offload.ExecutionError, match=r"copying %.* failed: the link is down"),
        ):
            run(x)
        assert all(map(torch.equal, run(x), model(x)))
        with before_copies(fail_nth(nth)):
            tickets = [run.submit(x) for _ in range(3)]
            outcomes = [one.exception(timeout=60) for one in tickets]
        assert sum(one is not None for one in outcomes) == 1
        assert "the link is down" in str(next(one for one in outcomes if one is not None))
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_a_launch_that_fails_in_another_memory():
    def pick(x, at):
        return torch.index_select(x.sin(), 0, at).cos().exp()

    x, at = normal(4, 4), torch.tensor([1])
    captured = offload.capture(pick, x, at)
    for where in all_ways(captured.program):
        with apart(captured.bound, where) as run:
            for call in (run, lambda *args, run=run: run.submit(*args).result()):
                with pytest.raises(offload.ExecutionError, match="index_select"):
                    call(x, torch.tensor([7]))
                assert torch.equal(call(x, at), pick(x, at))


@torch.no_grad()
def test_no_memory_for_what_crosses(monkeypatch):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {1: 1, 2: 1}) as run:
        run(x)
        n_copies = run._queue.links.n_copies

        def full(self, size_bytes):
            raise offload.OutOfMemory("full")

        with monkeypatch.context() as patch:
            patch.setattr(transfers.Memory, "bytes", full)
            with pytest.raises(offload.OutOfMemory, match="full"):
                run(x)
            with pytest.raises(offload.OutOfMemory, match="full"):
                run.submit(x)
        assert run._queue.links.n_copies == n_copies
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_callbacks_do_not_wait_for_transfers_that_their_thread_makes():
    """The last segment's result is copied back: the link's thread ends the ticket."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, dict.fromkeys(range(5), 1)) as run:
        for wait in (run, lambda x: run.submit(x).result(60), lambda _: run.close()):
            errors, ended = [], threading.Event()

            def call(_, wait=wait, errors=errors, ended=ended):
                try:
                    wait(x)
                except offload.ExecutionError as error:
                    errors.append(str(error))
                ended.set()

            go_on = threading.Event()
            with offload.tasks() as t:
                ticket = run.submit(t.submit(lambda go_on=go_on: (go_on.wait(60), x)[1]))
                ticket.add_done_callback(call)
                go_on.set()
            assert ended.wait(60)
            assert len(errors) == 1
            assert "done-callback" in errors[0]
            assert all(map(torch.equal, run(x), model(x)))
