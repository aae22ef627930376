"""Calls, threads, tickets, closing and errors while sizes are promoted to tasks."""

from __future__ import annotations

import os
import threading
import warnings

import capturing
import pytest
import torch
from capturing import check, eager, loaded
from promoting import executed_until_promoted, promoted_sizes
from torch import nn

import offload
from offload.host import captured_sizes
from offload.host.captured_sizes import CapturedSizes
from offload.run import Ticket


@pytest.fixture
def at_once(monkeypatch):
    capturing.at_once(monkeypatch)


# ---- threads, closing, forks, errors -------------------------------------------------------------


@pytest.fixture
def during(monkeypatch):
    """Called while sizes are prepared, in the waiting thread."""
    calls = []
    made = CapturedSizes.made

    def noted(work, sizes, call, is_wanted):
        for one in calls:
            one(sizes)
        return made(work, sizes, call, is_wanted)

    monkeypatch.setattr(CapturedSizes, "made", noted)
    return calls


def test_the_call_by_which_sizes_are_due_waits_and_others_go_on(at_once, during):
    run, seen = loaded(), []
    run(torch.randn(8, 16))

    def others(sizes):
        assert run.instances.promotion.preparing == (("n", 8),)
        work = [(8, 9, 9), (8, 40)]
        found = [[] for _ in work]
        threads = [
            threading.Thread(
                target=lambda sizes, found: found.extend(
                    check(run, torch.randn(size, 16)) for size in sizes
                ),
                args=one,
            )
            for one in zip(work, found, strict=True)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        seen.append((threading.get_ident(), found))

    during.append(others)
    assert check(run, torch.randn(8, 16))
    assert seen == [(threading.get_ident(), [[False] * 3, [False] * 2])]
    assert promoted_sizes(run) == [8]


def test_closing_ends_what_is_being_prepared(at_once, during):
    run = loaded()
    run(torch.randn(8, 16))
    during.append(lambda _: run.close())
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(torch.randn(8, 16))
    assert (run.instances.promotion.promoted, run.instances.promotion.preparing) == ((), ())
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(torch.randn(8, 16))


def test_what_cannot_be_captured_is_told_and_never_tried_again(at_once, during):
    run, tried = loaded(), []

    def fail(sizes):
        tried.append(sizes)
        if sizes == (8,):
            raise offload.CaptureError("aten::sort cannot be captured")

    during.append(fail)
    for size in (8, 9, 8, 9, 8, 9, 8):
        check(run, torch.randn(size, 16))
    assert tried == [(8,), (9,)]
    report = run.instances.promotion
    assert report.refused == (((("n", 8),), "CaptureError: aten::sort cannot be captured"),)
    assert promoted_sizes(run) == [9]
    assert report.waited_ns > 0
    assert "n = 8: not promoted: CaptureError: aten::sort" in run.explain()


def test_an_interrupt_ends_the_call_alone(at_once, during):
    interrupts = [KeyboardInterrupt()]

    def interrupt(_):
        if interrupts:
            raise interrupts.pop()

    during.append(interrupt)
    run = loaded()
    run(torch.randn(8, 16))
    with pytest.raises(KeyboardInterrupt):
        run(torch.randn(8, 16))
    assert run.instances.promotion.refused == ()
    assert run.instances.promotion.preparing == ()
    executed_until_promoted(run, 8)


def test_a_call_that_is_refused_has_nothing_prepared(at_once, during):
    """Its sizes are due, and its invalid arguments are not their fault."""
    asked = []
    during.append(asked.append)
    run = loaded()
    run(torch.randn(8, 16))
    with pytest.raises(offload.BindingError, match="expected float32"):
        run(torch.randn(8, 16, dtype=torch.float64))
    with pytest.raises(offload.BindingError, match="out"):
        run(torch.randn(8, 16), out=(torch.empty(9, 16), None))
    assert asked == []
    assert run.instances.promotion.refused == ()
    assert check(run, torch.randn(8, 16))


def test_who_is_captured_has_nothing_prepared(at_once, monkeypatch):
    may_capture = [False, True]
    monkeypatch.setattr(captured_sizes, "may_capture", lambda _: may_capture.pop(0))
    run = loaded()
    x = torch.randn(8, 16)
    assert [check(run, x) for _ in range(3)] == [False, False, True]
    assert run.instances.promotion.refused == ()


def test_a_forked_process_goes_on(at_once):
    run = loaded()
    executed_until_promoted(run, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            x = torch.randn(8, 16)
            assert torch.equal(run(x)[0], eager()(x)[0])
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert check(run, torch.randn(8, 16))


# ---- tickets -------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


def test_a_chain_of_tickets_across_the_promotion(at_once):
    model = Layer().eval()
    run = loaded(model=model)
    x = torch.randn(8, 16)
    expected, ticket = x, run.submit(x)
    for _ in range(6):
        ticket.wait()
        expected, ticket = model(expected), run.submit(ticket)
    assert torch.equal(ticket.result(), model(expected))
    assert promoted_sizes(run) == [8]
    assert run.instances.promotion.promoted[0].executions == 6


def test_what_waits_for_a_ticket_is_executed_as_a_task_where_there_is_one(at_once):
    """Bound on another thread, by the tasks that exist then; it prepares nothing there."""
    model = Layer().eval()
    run = loaded(model=model)
    x = torch.randn(8, 16)
    run(x)
    later = Ticket()
    tickets = [run.submit(later) for _ in range(3)]
    later._set_result(x)
    assert all(torch.equal(one.result(), model(x)) for one in tickets)
    assert promoted_sizes(run) == []
    run(x)
    later = Ticket()
    ticket = run.submit(later)
    later._set_result(x)
    assert torch.equal(ticket.result(), model(x))
    assert run.instances.promotion.promoted[0].executions == 2


def test_a_submission_in_a_done_callback_may_be_the_one_that_is_due(at_once):
    model = Layer().eval()
    run = loaded(model=model)
    x = torch.randn(8, 16)
    found = []
    ticket = run.submit(torch.randn(9, 16))
    run(x)
    ticket.add_done_callback(lambda _: found.append(run.submit(x)))
    run(torch.randn(10, 16))
    ticket.wait()
    assert torch.equal(found[0].result(), model(x))
    assert promoted_sizes(run) == [8]
