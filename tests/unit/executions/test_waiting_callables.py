"""Callables that wait for tickets, and errors of what a block of tasks depends on."""

from __future__ import annotations

import threading

import pytest
import torch
from task_callables import WAITING_SECONDS, Refused, refuse

import offload
from offload.run.task_threads import TaskThreads


@pytest.mark.parametrize("max_workers", [1, 2, None])
def test_callables_wait_for_callables_that_are_queued_behind_them(run, max_workers):
    def fibonacci(n):
        if n < 2:
            return n
        one, other = t.submit(fibonacci, n - 1), t.submit(fibonacci, n - 2)
        return one.result(WAITING_SECONDS) + other.result(WAITING_SECONDS)

    def executed(n):
        ticket = t.submit(run, t.submit(torch.full, (4,), float(n)))
        ticket.wait(WAITING_SECONDS)
        assert ticket.exception(WAITING_SECONDS) is None
        return next(iter(run.map([t.submit(run, ticket).result(WAITING_SECONDS)])))

    def in_a_block(n):
        outer = t.submit(lambda: n)
        with offload.tasks(max_workers=1) as inner:
            return inner.submit(lambda one: one + 1, outer)

    with offload.tasks(max_workers=max_workers) as t:
        found = t.submit(fibonacci, 7)
        results = [t.submit(executed, n) for n in range(6)]
        inner = [t.submit(in_a_block, n) for n in range(6)]
    assert found.result() == 13
    for n, ticket in enumerate(results):
        assert torch.equal(ticket.result(), torch.full((4,), n + 3.0))
    assert [ticket.result().result() for ticket in inner] == list(range(1, 7))


def test_callables_that_do_not_wait_are_limited():
    lock, counts, now = threading.Lock(), [], [0]

    def count():
        with lock:
            now[0] += 1
            counts.append(now[0])
        for _ in range(1000):
            pass
        with lock:
            now[0] -= 1

    def waits():
        t.submit(count).wait(WAITING_SECONDS)

    with offload.tasks(max_workers=2) as t:
        for _ in range(50):
            t.submit(waits)
            t.submit(count)
    # A callable that has waited goes on beside the limit, and here counts nothing any more.
    assert len(counts) == 100
    assert max(counts) <= 2


def test_a_callable_without_a_thread_is_refused_and_not_executed(monkeypatch):
    gate, executed, refused = threading.Event(), [], []
    pool = TaskThreads(2)
    pool.submit(gate.wait, refused.append)

    def start_none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_none)
        pool.submit(lambda: executed.append(1), refused.append)
    gate.set()
    pool.shut_down()
    (error,) = refused
    assert isinstance(error, offload.ExecutionError)
    assert str(error.__cause__) == "can't start new thread"
    assert not executed
    assert pool._n_executing == 0


def test_an_error_of_an_outer_dependency_surfaces(run):
    lookup = offload.capture(lambda x, at: x[at], torch.zeros(4), torch.arange(4)).load()

    def failing():
        return lookup.submit(torch.zeros(4), torch.arange(4) + 9)

    for submit in (
        lambda t: t.submit(run, failing()),
        lambda t: t.submit(run, t.submit(run, failing())),
        lambda t: t.after(failing()).submit(len, ()),
        lambda t: t.submit(lambda: run.submit(failing()).result()),
    ):
        with pytest.raises(offload.DependencyError) as caught, offload.tasks() as t:
            submit(t)
        assert "out of bounds" in str(caught.value.__cause__)
    told = failing()
    assert "out of bounds" in str(told.exception())
    with offload.tasks() as t:
        t.submit(run, told)
    told_later = failing()
    with offload.tasks() as t:
        t.submit(run, told_later)
        while t._in_flight:
            t._drop_ended()
        assert "out of bounds" in str(told_later.exception())


def test_an_error_that_callables_pass_on_surfaces_once(run):
    lookup = offload.capture(lambda x, at: x[at], torch.zeros(4), torch.arange(4)).load()

    def in_a_block(ticket):
        with offload.tasks() as inner:
            inner.submit(run, ticket[0])

    with pytest.raises(Refused), offload.tasks() as t:  # noqa: PT012
        first = t.submit(refuse)
        t.submit(in_a_block, [first])
        t.submit(lambda: t.submit(run, first).result())
    with pytest.raises(offload.ExecutionError, match="out of bounds"), offload.tasks() as t:  # noqa: PT012
        first = t.submit(lookup, torch.zeros(4), torch.arange(4) + 9)
        t.submit(in_a_block, [first])
        t.submit(lambda: t.submit(run, first).result())


def dependents(kind, block, run, first):
    """Some submissions, each behind the one before; return the last one's ticket."""
    last = first
    for _ in range(5):
        if kind == "callables":
            last = block.submit(lambda x: x, last)
        elif kind == "after":
            last = block.after(last).submit(run, torch.zeros(4))
        else:
            last = run.submit(last) if kind == "outside" else block.submit(run, last)
    return last


@pytest.mark.parametrize("kind", ["callables", "executions", "after", "outside"])
@pytest.mark.parametrize("wait", ["result", "wait", "exception", "event"])
def test_a_callable_that_waits_for_what_waits_for_it_is_refused(run, gate, kind, wait):
    tickets = {}

    def waits():
        gate.wait(WAITING_SECONDS)
        with pytest.raises(TimeoutError):
            tickets["last"].result(0)  # it ends by itself
        with pytest.raises(offload.ExecutionError, match="neither would end"):
            getattr(tickets["last"], wait)()
        return torch.ones(4)

    with offload.tasks() as t:
        first = t.submit(waits)
        tickets["last"] = dependents(kind, t, run, first)
        gate.set()
    expected = {"callables": 1.0, "executions": 6.0, "after": 1.0, "outside": 6.0}[kind]
    assert torch.equal(tickets["last"].result(), torch.full((4,), expected))


def test_callables_that_wait_for_themselves_and_for_each_other_are_refused(gate):
    tickets = {}

    def waits_for(name):
        gate.wait(WAITING_SECONDS)
        return tickets[name].result()

    with offload.tasks() as t:
        tickets["itself"] = t.submit(waits_for, "itself")
        tickets["one"], tickets["other"] = (t.submit(waits_for, one) for one in ("other", "one"))
        gate.set()
        for ticket in tickets.values():
            assert isinstance(ticket.exception(), offload.ExecutionError)
