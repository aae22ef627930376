"""Calls over several devices are checked as by one device, and weights rebound, before any runs."""

import gc
import threading
import time
import weakref

import pytest
import torch
from apart import apart, movable_tasks
from checks import normal
from torch import nn

import offload


class Steps(nn.Module):
    """Two matrices, each in a task; the first writes the input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(normal(8, 8))
        self.second = nn.Parameter(normal(8, 8))

    def forward(self, x):
        return (x @ self.first).sin() @ self.second


class Writing(nn.Module):
    """Its first task writes one input; a later one reads another, and a constant of the host."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", normal(8))

    def forward(self, x, y):
        x.add_(1)
        return (x.sin() + 1).cos() * self.scale + y.exp()


def everywhere(captured):
    """One device, and every task that may move on the second of two."""
    return captured.load("cpu"), apart(
        captured.bound, dict.fromkeys(movable_tasks(captured.program), 1)
    )


def test_calls_are_refused_as_by_one_device():
    """With the same words, before the first segment has written its input."""
    with torch.no_grad():
        captured = offload.capture(Writing(), normal(4, 8), normal(4, 8))
        one, several = everywhere(captured)
    assert len(several.segments) > 1
    x = normal(4, 8)
    kept = x.clone()
    freed, shrunk = normal(4, 8), normal(4, 8)
    freed.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(8)
    refused = (
        (x, normal(4, 8).requires_grad_()),
        (x, normal(4, 8).to_sparse()),
        (x, torch._efficientzerotensor(4, 8)),
        (x, freed),
        (x, shrunk),
        (x, normal(4, 8).double()),
        (x, normal(4, 8).to("meta")),
        (x, normal(8, 4)),
        (x[:1].expand(4, 8), normal(4, 8)),
        (x, x),
        (x, 3),
        (x,),
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(normal(4, 8), normal(4, 8))
        for args in (*refused, (x, dual)):
            told = []
            for run in (one, several):
                for call in (run, run.submit):
                    with pytest.raises(offload.BindingError) as error:
                        call(*args)
                    told.append(str(error.value))
            assert len(set(told)) == 1
            assert torch.equal(x, kept)
    assert several._queue.links.n_copies == 0
    y = normal(4, 8)
    with torch.no_grad():
        found = [run(kept.clone(), y) for run in (one, several)]
    assert torch.equal(*found)
    several.close()


def test_other_layouts_are_refused():
    """One device copies them; transfers take the recorded layout alone."""
    with torch.no_grad():
        captured = offload.capture(Writing(), normal(4, 8), normal(4, 8))
        one, several = everywhere(captured)
        x, other = normal(4, 8), normal(8, 4).t()
        one(x.clone(), other)
        with pytest.raises(
            offload.BindingError, match=r"args\[1\]: expected float32\[4, 8\] with strides \[8, 1\]"
        ):
            several(x, other)
        several.close()


def test_a_transformed_call_is_refused():
    with torch.no_grad():
        captured = offload.capture(Writing(), normal(4, 8), normal(4, 8))
        _, several = everywhere(captured)
        x, y = normal(4, 8), normal(4, 8)
        kept = x.clone()
        with pytest.raises(offload.BindingError, match="vmap"):
            torch.vmap(lambda each: several(x, y) * each)(normal(3, 4, 8))
        assert torch.equal(x, kept)
        several.close()


def test_a_submission_keeps_the_gradient_mode_of_its_thread():
    """The thread that queues it later has gradients switched on."""
    with torch.no_grad():
        captured = offload.capture(Steps().eval(), normal(4, 8))
    given, go_on = nn.Parameter(normal(4, 8)), threading.Event()

    def later():
        go_on.wait(20)
        return given

    with apart(captured.bound, {0: 1}) as run, offload.tasks() as tasks:
        with torch.no_grad():
            without = run.submit(tasks.submit(later))
        recording = run.submit(tasks.submit(later))
        go_on.set()
        assert torch.equal(without.result(), run(given.detach()))
        with pytest.raises(offload.BindingError, match="requires gradients"):
            recording.result()


@torch.no_grad()
def test_rebinding_waits_for_executions_under_way():
    """None of them reads an old first and a new second weight."""
    model, x = Steps(), normal(4, 8)
    captured = offload.capture(model, x)
    go_on = threading.Event()
    with apart(captured.bound, {1: 1}) as run, offload.tasks() as tasks:
        assert len(run.segments) > 1
        expected = model(x)
        gate = tasks.submit(go_on.wait, 20)
        ticket = run.after(gate).submit(x)
        rebinding = threading.Thread(target=run.rebind_weights)
        rebinding.start()
        rebinding.join(0.2)
        assert rebinding.is_alive()
        go_on.set()
        assert torch.equal(ticket.result(), expected)
        rebinding.join(20)
        assert not rebinding.is_alive()
        model.first.data, model.second.data = normal(8, 8), normal(8, 8)
        run.rebind_weights()
        assert torch.equal(run(x), model(x))


@torch.no_grad()
def test_rebinding_where_it_could_wait_for_itself_is_refused():
    model, x = Steps(), normal(4, 8)
    captured = offload.capture(model, x)
    errors, rebind_allowed = [], threading.Event()

    def rebind(*_):
        try:
            run.rebind_weights()
        except offload.ExecutionError as error:
            errors.append(str(error))

    with apart(captured.bound, {1: 1}) as run, offload.tasks() as tasks:
        gate = tasks.submit(lambda: (rebind_allowed.wait(20), rebind()))
        ticket = run.after(gate).submit(x)
        rebind_allowed.set()
        assert torch.equal(ticket.result(), model(x))
        assert len(errors) == 1
        assert "call it outside" in errors[0]
        gate = tasks.submit(rebind_allowed.wait, 20)
        tickets = [run.after(gate).submit(x) for _ in range(2)]
        tickets[0].add_done_callback(rebind)
        for one in tickets:
            assert torch.equal(one.result(), model(x))
        run.rebind_weights()
        assert torch.equal(run(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("wrong", [0, 1])
def test_all_weights_are_rebound_or_none(wrong):
    """The layouts of all are checked first, whichever of them is wrong."""
    model, x = Steps(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {1: 1}) as run:
        kept = model.first.data, model.second.data
        expected = run(x)
        model.first.data, model.second.data = normal(8, 8), normal(8, 8)
        holder = (model.first, model.second)[wrong]
        fitting, holder.data = holder.data, normal(8, 9)[:, :8]
        with pytest.raises(offload.BindingError, match="of the same layout"):
            run.rebind_weights()
        model.first.data, model.second.data = kept
        assert torch.equal(run(x), expected)
        model.first.data, model.second.data = normal(8, 8), normal(8, 8)
        holder.data = fitting
        run.rebind_weights()
        assert torch.equal(run(x), model(x))


@torch.no_grad()
def test_where_a_segment_cannot_rebind_calls_are_refused_until_it_can(monkeypatch):
    model, x = Steps(), normal(4, 8)
    captured = offload.capture(model, x)
    where = dict.fromkeys(range(20), 0)
    with apart(captured.bound, {**where, 1: 1}) as run:
        home = [one.runs[0] for one in run.segments if one.runs[0] is not None]
        assert len(home) > 1
        model.first.data, model.second.data = normal(8, 8), normal(8, 8)
        with monkeypatch.context() as patch:

            def fail(self):
                raise offload.OutOfMemory("no room for packed weights")

            patch.setattr(type(home[-1]), "rebind_weights", fail)
            with pytest.raises(offload.OutOfMemory):
                run.rebind_weights()
        for call in (run, run.submit):
            with pytest.raises(offload.BindingError, match="rebind_weights"):
                call(x)
        run.rebind_weights()
        assert torch.equal(run(x), model(x))


@torch.no_grad()
def test_weights_that_move_within_their_storage_stay_bound():
    model, x = Steps(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {1: 1}) as run:
        expected = run(x)
        for one in model.parameters():
            one.share_memory_()
        assert torch.equal(run(x), expected)


@torch.no_grad()
def test_ended_executions_keep_no_memory():
    """The queue knows executions under way, and not their results."""
    captured = offload.capture(Steps(), normal(4, 8))
    with apart(captured.bound, {1: 1}) as run:
        result = run(normal(4, 8))
        ticket = run.submit(normal(4, 8))
        refs = [
            weakref.ref(result.untyped_storage()),
            weakref.ref(ticket),
            weakref.ref(ticket.result()),
        ]
        del result, ticket
        ends = time.monotonic() + 60
        while any(one() is not None for one in refs) and time.monotonic() < ends:
            time.sleep(0.001)  # the thread that ended the ticket holds it a moment longer
            gc.collect()
        assert [one() for one in refs] == [None] * 3
