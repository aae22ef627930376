"""Tickets of promoted sizes: as arguments, waiting for others, and counted."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from promoting import captured_model
from torch import nn

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.host.promoted_sizes import FusedSizes
from offload.run import Ticket

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("kernels_folder", "at_once", "waited")

WAITING_SECONDS = 60


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


@pytest.fixture(scope="module")
def captured():
    return captured_model(Layer().eval())


@pytest.fixture
def run(captured):
    with captured.load(sizes=offload.Sizes(promoted="64MiB"), fuse=True) as run:
        yield run


@pytest.fixture
def copied(monkeypatch):
    """The tensors of calls that were copied, by which kernels are proved."""
    tensors: list[torch.Tensor] = []
    copy = FusedSizes.kept

    def noted(self, sizes, args, kwargs):
        call = copy(self, sizes, args, kwargs)
        tensors.extend(call.args)
        return call

    monkeypatch.setattr(FusedSizes, "kept", noted)
    return tensors


@contextlib.contextmanager
def held_up(run, x):
    """Block an executable's thread in a done-callback."""
    entered, gate = threading.Event(), threading.Event()

    def wait(_):
        entered.set()
        assert gate.wait(WAITING_SECONDS)

    begin = Ticket()
    ticket = run.after(begin).submit(x)
    ticket.add_done_callback(wait)  # a ticket that has ended would call it on this thread
    begin._set_result(None)
    assert entered.wait(WAITING_SECONDS)
    try:
        yield
    finally:
        gate.set()


def promoted(run):
    return [dict(one.sizes)["n"] for one in run.instances.promotion.promoted]


def n_promoted_executions(run):
    (one,) = run.instances.promotion.promoted
    return one.executions


def test_a_chain_across_the_promotion(run):
    x = torch.randn(8, 16)
    expected, ticket = x, run.submit(x)
    model = Layer().eval()
    for _ in range(6):
        ticket.wait()
        expected, ticket = model(expected), run.submit(ticket)
    torch.testing.assert_close(ticket.result(), model(expected))
    assert promoted(run) == [8]
    assert n_promoted_executions(run) == 6
    assert run.last_execution.n_executions == 7


def test_results_without_content_prove_nothing(run, copied):
    """A call is copied when bound, possibly before an earlier execution has begun."""
    model, x = Layer().eval(), torch.randn(8, 16)
    run(x)  # from now on its sizes are due
    with offload.capture(lambda x: x + 1, x).load() as before:
        with held_up(before, x):
            first = before.submit(x)
            tickets = [run.submit(first) for _ in range(3)]
            assert not first.done()
            assert not copied
        for one in tickets:
            torch.testing.assert_close(one.result(), model(x + 1))
        assert promoted(run) == []
        torch.testing.assert_close(run.submit(first).result(), model(x + 1))  # it has ended
    assert promoted(run) == [8]
    assert [torch.equal(one, x + 1) for one in copied] == [True]


def test_what_waits_for_a_ticket_is_bound_by_what_there_is_then(run, copied):
    """On another thread, whose state is not the call's; by kernels where sizes have them."""
    model, x = Layer().eval(), torch.randn(8, 16)
    run(x)
    later = Ticket()
    tickets = [run.submit(later) for _ in range(3)]
    later._set_result(x)
    for one in tickets:
        torch.testing.assert_close(one.result(), model(x))
    assert not copied
    later = Ticket()
    ticket = run.submit(later)
    run(x)
    assert promoted(run) == [8]
    n_executions = n_promoted_executions(run)
    later._set_result(x)
    torch.testing.assert_close(ticket.result(), model(x))
    assert n_promoted_executions(run) == n_executions + 1


def test_executions_that_nobody_asks_for_are_counted(run):
    """When their tickets end; requested results count once."""
    x = torch.randn(8, 16)
    for _ in range(2):
        tickets = [run.submit(x) for _ in range(5)]
        run.submit(torch.randn(9, 16)).wait()  # after them
        del tickets
        for _ in range(2):
            ticket = run.submit(x)
            ticket.wait()
            ticket.result()
            ticket.result()
    one = next(one for one in run.instances.promotion.promoted if one.sizes == (("n", 8),))
    assert one.rented_executions == 5
    assert one.executions == 2 + 5 + 2


def test_promoted_executions_wait_for_tickets_and_fail_with_them(run, captured):
    x, model = torch.randn(8, 16), Layer().eval()
    run(x), run(x)
    with captured.load(sizes=offload.Sizes()) as other:
        torch.testing.assert_close(run.submit(other.submit(x)).result(), model(model(x)))
        torch.testing.assert_close(other.submit(run.submit(x)).result(), model(model(x)))
    later = Ticket()
    first, last = run.after(later).submit(x), run.submit(x)
    later._set_error(KeyError("no such batch"))
    with pytest.raises(offload.DependencyError) as told:
        first.result()
    assert isinstance(told.value.__cause__, KeyError)
    torch.testing.assert_close(last.result(), model(x))


def test_a_close_waits_for_promoted_tickets(run):
    x, model = torch.randn(8, 16), Layer().eval()
    run(x), run(x)
    first = run.submit(x)
    tickets = [first, run.submit(first), run.submit(x)]
    run.close()
    assert all(one.done() for one in tickets)
    torch.testing.assert_close(tickets[1].result(), model(model(x)))
    with pytest.raises(offload.ExecutionError):
        run.submit(x)


def test_a_cancelled_promoted_execution_is_not_begun(run):
    x = torch.randn(8, 16)
    run(x), run(x)
    before = n_promoted_executions(run)
    with held_up(run, x):
        ticket = run.submit(x)
        follower = run.submit(ticket)
        assert ticket.cancel()
    run.submit(x).wait()
    assert follower.cancelled()
    assert n_promoted_executions(run) == before + 2
