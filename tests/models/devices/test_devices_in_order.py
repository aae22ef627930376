"""Executions on several devices that wait: for one another, for arguments, or at the close."""

import threading

import pytest
import torch
from given_times import TWO, alternating, let_launches_take
from torch import nn

import offload
from offload.run.device_choice import Placement


@torch.no_grad()
def test_a_written_buffer_is_written_in_order(monkeypatch):
    let_launches_take(monkeypatch, alternating(2, 1e6))

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(4))

        def forward(self, x):
            y = (x.sin() + 1).cos()
            self.n.add_(y.sum())
            return self.n * y

    model, twin, x = Counts(), Counts(), torch.randn(4)
    run = offload.capture(model, x).load(TWO)
    model.n.zero_()
    inputs = [torch.randn(4) for _ in range(10)]
    tickets = [run.submit(one) for one in inputs]
    for one, ticket in zip(inputs, tickets, strict=True):
        assert torch.equal(ticket.result(), twin(one))
    assert torch.equal(model.n, twin.n)


@torch.no_grad()
def test_an_error_is_told_once_and_with_its_origin(monkeypatch):
    let_launches_take(monkeypatch, alternating(1, 1e6))

    def pick(x, at):
        y = torch.index_select(x.sin(), 0, at)
        return y.cos().exp().tan()

    x, at = torch.randn(4, 4), torch.tensor([1])
    run = offload.capture(pick, x, at).load(TWO)
    assert len(run.segments) > 1
    for call in (run, lambda *args: run.submit(*args).result()):
        with pytest.raises(offload.ExecutionError, match="index_select"):
            call(x, torch.tensor([7]))
        assert torch.equal(call(x, at), pick(x, at))


class Counts(nn.Module):
    """Counts what it has seen, and selects by the count."""

    def __init__(self, size=4):
        super().__init__()
        self.register_buffer("n", torch.zeros(size))

    def forward(self, x, at):
        y = (x.sin() + 1).cos()
        self.n.add_(y.sum())
        return torch.index_select(self.n * y, 0, at).exp()


@torch.no_grad()
def test_inputs_that_share_written_memory_are_refused(monkeypatch):
    """No segment has both; an Executable of the whole raises the same."""
    let_launches_take(monkeypatch, alternating(1, 1e6))

    def write(x, y):
        x.add_(1)
        return x.sin() + 1, y.cos().exp()

    captured = offload.capture(write, torch.zeros(4), torch.zeros(4))
    run = captured.load(TWO)
    assert len(run.segments) > 1
    x = torch.zeros(6)
    for one in (captured.load("cpu"), run):
        for other in (x[:4], x[2:]):
            with pytest.raises(offload.BindingError, match=r"args\[0\] and args\[1\] overlap"):
                one(x[:4], other)
    assert not x.any()
    assert all(map(torch.equal, run(x[:2].repeat(2), x[2:]), write(torch.zeros(4), x[2:])))
    model, at = Counts(), torch.tensor([1])
    run = offload.capture(model, x[:4], at).load(TWO)
    assert len(run.segments) > 1
    kept = model.n.clone()
    with pytest.raises(offload.BindingError, match=r"args\[0\] overlaps n in memory"):
        run(model.n, at)
    assert torch.equal(model.n, kept)


@torch.no_grad()
def test_inputs_that_shared_memory_when_recorded_do_so_again(monkeypatch):
    let_launches_take(monkeypatch, alternating(1, 1e6))

    def write(x, y, z):
        x.add_(1)
        return y.sin() + 1, x.cos(), z.sin().cos()

    recorded, z = torch.zeros(8), torch.randn(4)
    run = offload.capture(write, recorded[:6], recorded[2:], z).load(TWO)
    assert len(run.segments) > 1
    x, twin = torch.arange(8.0), torch.arange(8.0)
    assert all(map(torch.equal, run(x[:6], x[2:], z), write(twin[:6], twin[2:], z)))
    with pytest.raises(offload.BindingError, match="shared memory when recorded, 8 bytes apart"):
        run(x[:6], torch.zeros(6), z)
    assert torch.equal(x, twin)


@pytest.mark.parametrize("placement", Placement)
@torch.no_grad()
def test_executions_behind_one_that_failed(placement, monkeypatch):
    """Where they leave something they wait for it, and do not fail with it."""
    let_launches_take(monkeypatch, alternating(1, 1e6))
    model, x, at = Counts(), torch.ones(4), torch.tensor([1])
    run = offload.capture(model, x, at).load(TWO, placement=placement)
    assert len(run.segments) > 1
    model.n.zero_()
    twin, wrong = Counts(), torch.tensor([7])
    for _ in range(5):
        tickets = [run.submit(x, one) for one in (at, wrong, at)]
        expected = []
        for one in (at, wrong, at):
            try:
                expected.append(twin(x, one))
            except IndexError:
                expected.append(None)
        assert torch.equal(tickets[0].result(), expected[0])
        with pytest.raises(offload.ExecutionError, match="index_select"):
            tickets[1].result()
        assert torch.equal(tickets[2].result(), expected[2])
        with pytest.raises(offload.ExecutionError, match="index_select"):
            run(x, wrong)
        with pytest.raises(IndexError):
            twin(x, wrong)
        assert torch.equal(run(x, at), twin(x, at))
    assert torch.equal(model.n, twin.n)


@pytest.mark.parametrize("placement", Placement)
@torch.no_grad()
def test_one_segment_that_leaves_something(placement, monkeypatch):
    """Calls after submissions: the thread that ends a submission sees it; no call prevents that."""
    let_launches_take(monkeypatch, [lambda _: 1e3, lambda _: 1e6])
    model, x, at = Counts(), torch.ones(4), torch.tensor([1])
    run = offload.capture(model, x, at).load(TWO, placement=placement)
    assert len(run.segments) == 1
    model.n.zero_()
    twin = Counts()
    for _ in range(200):
        tickets = [run.submit(x, at) for _ in range(3)]
        called = run(x, at)
        for one in tickets:
            assert torch.equal(one.result(), twin(x, at))
        assert torch.equal(called, twin(x, at))


@torch.no_grad()
def test_closing_waits_for_submissions_whose_arguments_are_under_way(monkeypatch):
    let_launches_take(monkeypatch, alternating(1, 1e6))

    def chain(x):
        return (x.sin() + 1).cos().exp()

    x, go_on = torch.randn(4), threading.Event()
    run = offload.capture(chain, x).load(TWO)
    with offload.tasks() as tasks:
        given = tasks.submit(lambda: (go_on.wait(20), x)[1])
        ticket = run.submit(given)
        closing = threading.Thread(target=run.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        go_on.set()
        closing.join()
    assert torch.equal(ticket.result(), chain(x))
    assert run.closed


@torch.no_grad()
def test_done_callbacks_do_not_close(monkeypatch):
    """A segment's thread would wait for others, and these for it."""
    let_launches_take(monkeypatch, alternating(1, 1e6))
    go_on, errors = threading.Event(), []

    def close(_):
        try:
            run.close()
        except offload.ExecutionError as error:
            errors.append(str(error))

    def chain(x):
        return (x.sin() + 1).cos().exp()

    x = torch.randn(4)
    run = offload.capture(chain, x).load(TWO)
    with offload.tasks() as tasks:
        tickets = [run.submit(tasks.submit(lambda: (go_on.wait(20), x)[1])) for _ in range(5)]
        tickets[0].add_done_callback(close)
        go_on.set()
        for one in tickets:
            assert torch.equal(one.result(), chain(x))
    assert len(errors) == 1
    assert "done-callback" in errors[0]
    assert not run.closed
    run.close()


@torch.no_grad()
def test_submissions_that_wait_for_arguments_keep_their_surroundings(monkeypatch):
    """The thread that queues them has no autocast; the submitter's state counts."""
    let_launches_take(monkeypatch, alternating(1, 1e6))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    model.eval()

    def later():
        go_on.wait(20)
        return x

    go_on = threading.Event()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = offload.capture(model, x).load(TWO)
        expected = model(x)
    assert len(run.segments) > 1
    with offload.tasks() as tasks:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = run.submit(tasks.submit(later))
        with pytest.raises(offload.BindingError, match="autocast on cpu"):
            run.submit(tasks.submit(lambda: x))
        go_on.set()
        assert torch.equal(inside.result(), expected)
    run.close()
