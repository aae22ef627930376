"""Copies of weights in other memories: made again once weights are written, refused once moved."""

import threading

import pytest
import torch
from apart import apart
from checks import normal
from copies import before_copies, weights_fail
from two_branches import TwoBranches

import offload
from offload.run import placed_queue, transfers
from offload.run.device_choice import Placement


@torch.no_grad()
def test_a_weight_that_is_written_is_copied_again():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1, 3: 1}) as run:
        for step in range(5):
            assert all(map(torch.equal, run(x), model(x)))
            n_copies = run._queue.links.n_copies
            run(x)
            n_each = run._queue.links.n_copies - n_copies
            tickets = [run.submit(x) for _ in range(3)]
            expected = model(x)
            for one in tickets:
                assert all(map(torch.equal, one.result(), expected))
            model.weight.mul_(0.5 + step)
            n_copies = run._queue.links.n_copies
            assert all(map(torch.equal, run(x), model(x)))
            assert run._queue.links.n_copies - n_copies == n_each + 1


def test_a_weight_that_an_optimizer_steps_unseen_is_copied_again():
    model, x = TwoBranches(), normal(4, 8)
    with torch.no_grad():
        captured = offload.capture(model, x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    with apart(captured.bound, {0: 1, 3: 1}) as run:
        for _ in range(3):
            sum(one.sum() for one in model(x)).backward()
            optimizer.step()
            with torch.no_grad():
                assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_a_weight_that_was_moved_is_refused_until_it_is_bound_again():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        expected = run(x)
        kept = model.weight.data
        model.weight.data = normal(8, 8)
        with pytest.raises(offload.BindingError, match=r"weight.*call run\.rebind_weights"):
            run(x)
        run.rebind_weights()
        assert all(map(torch.equal, run(x), model(x)))
        model.weight.data = kept
        run.rebind_weights()
        assert all(map(torch.equal, run(x), expected))


@torch.no_grad()
def test_a_refresh_that_fails_is_made_again():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        run(x)
        model.weight.mul_(2)
        with (
            before_copies(weights_fail),
            pytest.raises(offload.ExecutionError, match="weights that were written"),
        ):
            run(x)
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_a_refresh_that_fails_before_the_execution_is_queued_fails_it(monkeypatch):
    """The execution does not read the stale copies."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        run(x)
        copy = transfers.Links.copy

        def copy_weights_now(self, origin, target, pieces, what, **order):
            ticket = copy(self, origin, target, pieces, what, **order)
            if what.startswith("weights"):
                ticket._outcome(60)
            return ticket

        model.weight.mul_(2)
        with monkeypatch.context() as patch, before_copies(weights_fail):
            patch.setattr(transfers.Links, "copy", copy_weights_now)
            for call in (run, lambda x: run.submit(x).result(60)):
                with pytest.raises(offload.ExecutionError, match="weights that were written"):
                    call(x)
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_a_weight_that_shrinks_before_it_is_copied_again():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        run(x)
        kept = model.weight.detach().clone()

        def shrink(piece):
            if piece.size_bytes == 256:
                model.weight.untyped_storage().resize_(0)

        model.weight.mul_(2)
        with (
            before_copies(shrink),
            pytest.raises(offload.ExecutionError, match="freed or shrunk"),
        ):
            run(x)
        model.weight.data = kept
        run.rebind_weights()
        assert all(map(torch.equal, run(x), model(x)))


@pytest.mark.parametrize("kind", [Placement.STATIC, Placement.HYBRID])
@torch.no_grad()
def test_an_execution_that_is_refused_does_not_cancel_what_another_waits_for(kind, monkeypatch):
    """Both wait for the same copies of weights; the second fails while it is queued."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    costs_ns = None if kind is Placement.STATIC else [2e3, 1e3]
    with apart(captured.bound, {0: 1, 3: 1}, 2, kind, None, costs_ns) as run:
        run(x)
        go_on = threading.Event()
        refused, segment = [], placed_queue._Queueing._segment

        def refuse(self, *args):
            if refused and len(self._segments) == len(run.segments) - 1:
                raise offload.BindingError("not this one")
            return segment(self, *args)

        monkeypatch.setattr(placed_queue._Queueing, "_segment", refuse)
        model.weight.mul_(2)
        with before_copies(lambda _: go_on.wait(60)):
            ticket = run.submit(x)
            refused.append(True)
            with pytest.raises(offload.BindingError, match="not this one"):
                run(x)
            refused.clear()
            go_on.set()
            assert all(map(torch.equal, ticket.result(60), model(x)))
        assert all(map(torch.equal, run(x), model(x)))
