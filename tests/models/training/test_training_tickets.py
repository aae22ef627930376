"""Training steps as submissions: comparisons, their times, and waits for tickets."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch
from torch import nn
from training import adamw, adding_step, assert_alike, captured_step, mse_step, twins

import offload
from offload.run import Ticket


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randn(4, 8)


def training(make_step):
    """A loaded step, its side, and eager's, which has the same state."""
    ours, eager = twins(net(), adamw, make_step)
    first = batch()
    run = captured_step(ours.step, *first).load()
    eager.step(*first)
    return run, ours, eager


@pytest.mark.parametrize("make_step", [mse_step, adding_step])
def test_steps_that_wait_for_batches(make_step):
    run, ours, eager = training(make_step)
    given = [batch() for _ in range(4)]
    later = [Ticket() for _ in given]
    tickets = [run.submit(one, target) for one, (_, target) in zip(later, given, strict=True)]
    for one, (x, _) in reversed(list(zip(later, given, strict=True))):
        one._set_result(x)
    for ticket, one in zip(tickets, given, strict=True):
        assert torch.equal(ticket.result(), eager.step(*one))
    assert_alike(ours, eager)


@pytest.mark.parametrize("make_step", [mse_step, adding_step])
def test_what_is_put_in_order_waits_for_steps_that_wait(make_step):
    """Gradients that are dropped between submissions, of which the first have no batch yet."""
    run, ours, eager = training(make_step)
    given = [batch() for _ in range(4)]
    later = Ticket()
    tickets = [run.submit(later, given[0][1]), run.submit(*given[1])]
    ours.optimizer.zero_grad()
    timer = threading.Timer(0.2, later._set_result, (given[0][0],))
    timer.start()
    tickets += [run.submit(*one) for one in given[2:]]
    timer.join()
    for number, (ticket, one) in enumerate(zip(tickets, given, strict=True)):
        if number == 2:
            eager.optimizer.zero_grad()
        assert torch.equal(ticket.result(), eager.step(*one))
    assert_alike(ours, eager)


def test_what_is_refused_is_so_at_the_submission():
    """And not in the ticket of a submission that waits."""
    run, ours, eager = training(mse_step)
    x, target = batch()
    later = Ticket()
    ours.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(offload.BindingError, match="maximize"):
        run.submit(later, target)
    ours.optimizer.param_groups[0]["maximize"] = False
    with torch.no_grad(), pytest.raises(offload.BindingError):
        run.submit(later, target)
    ticket = run.submit(later, target)
    with torch.no_grad():
        later._set_result(x)  # which binds, with the grad mode of the submission
    assert torch.equal(ticket.result(), eager.step(x, target))
    assert_alike(ours, eager)


def test_a_callback_in_which_a_step_would_wait_is_refused():
    """It blocks the thread that the steps in the queue wait for."""
    run, ours, eager = training(adding_step)
    x, target = batch()
    before = offload.capture(lambda x: x + 1, x).load()
    told: concurrent.futures.Future[BaseException | None] = concurrent.futures.Future()
    entered, submitted = threading.Event(), threading.Event()
    caller, was_late = threading.get_ident(), []

    def submit(_: Ticket) -> None:
        if threading.get_ident() == caller:  # the execution has ended before
            was_late.append(True)
            return
        entered.set()
        assert submitted.wait(60)
        ours.optimizer.zero_grad()
        try:
            run.submit(x, target)
        except BaseException as error:
            told.set_result(error)
        else:
            told.set_result(None)

    before.submit(x).add_done_callback(submit)
    while was_late:
        was_late.clear()
        before.submit(x).add_done_callback(submit)
    assert entered.wait(60)
    second = before.submit(x)  # after the callback
    step = run.submit(second, target)  # waits for it on the executable's thread
    submitted.set()
    assert isinstance(told.result(60), offload.ExecutionError)
    assert torch.equal(step.result(), eager.step(x + 1, target))
    eager.optimizer.zero_grad()
    assert torch.equal(run.submit(x, target).result(), eager.step(x, target))
    assert_alike(ours, eager)


def test_tasks_of_an_epoch():
    run, ours, eager = training(mse_step)
    given = [batch() for _ in range(6)]
    with offload.tasks(buffersize=3) as t:
        tickets = [t.submit(run, t.submit(torch.clone, x), target) for x, target in given]
    assert [one.result().item() for one in tickets] == [eager.step(*one).item() for one in given]
    assert list(run.map(given)) == [eager.step(*one) for one in given]
    assert_alike(ours, eager)
