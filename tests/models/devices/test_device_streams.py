"""Streams of batches on one device and on several: errors, closing and cancelling in the middle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading

import pytest
import torch
from apart import apart
from on_lanes import Towers

import offload
from offload.backends import CpuBackend
from offload.run.device_choice import Placement

WAITING_SECONDS = 60


class Refused(Exception):
    """Raised by the batches of these tests."""


@pytest.fixture(scope="module")
def model():
    return Towers(32, 3, n=1)


@pytest.fixture(scope="module")
def captured(model):
    with torch.no_grad():
        return offload.capture(model, torch.zeros(4, 32))


@pytest.fixture(params=["one device", *((kind, way) for kind in Placement for way in "as")])
def run(captured, request):
    with torch.no_grad():
        if request.param == "one device":
            made = captured.load("cpu")
        elif request.param[1] == "a":
            kind = request.param[0]
            costs_ns = None if kind is Placement.STATIC else [2e5, 1e5]
            made = apart(captured.bound, {0: 1, 2: 1}, 2, kind, None, costs_ns)
        else:
            made = captured.load([CpuBackend(threads=1)] * 2, placement=str(request.param[0]))
        with made:
            yield made


def numbered(number):
    return torch.full((4, 32), float(number))


def batches(n, refused_at=-1):
    for number in range(n):
        if number == refused_at:
            raise Refused
        yield numbered(number)


def taken(results):
    """The results of a stream, and the error that ends it."""
    found = []
    try:
        for one in results:
            found.append(one)
    except Exception as error:
        return found, error
    return found, None


@torch.no_grad()
def test_bytes_in_flight_count_results(run, model):
    """1.5 KiB: a batch's argument and result take 1 KiB, and two batches more than is allowed."""
    begun = []

    def noted():
        for number, batch in enumerate(batches(10)):
            begun.append(number)
            yield batch

    for number, y in enumerate(run.map(noted(), buffersize=10, buffer_bytes=1536)):
        assert torch.equal(y, model(numbered(number)))
        assert len(begun) <= number + 2  # this one, and one that waits for its place


def test_batches_that_raise(run, model):
    """Results before the error come first; the executable goes on."""
    for refused_at in (0, 1, 6):
        found, error = taken(run.map(batches(9, refused_at), buffersize=3))
        assert isinstance(error, Refused)
        assert len(found) == refused_at
        for number, one in enumerate(found):
            assert torch.equal(one, model(numbered(number)))


@torch.no_grad()
def test_a_batch_that_does_not_fit(run, model):
    given = [numbered(0), numbered(1), torch.zeros(3, 3), numbered(2)]
    found, error = taken(run.map(given))
    assert isinstance(error, offload.BindingError)
    assert len(found) == 2
    assert torch.equal(run(numbered(5)), model(numbered(5)))


@torch.no_grad()
def test_a_stream_that_is_closed_in_the_middle(run, model):
    results = run.map(batches(100), buffersize=3)
    for number in range(2):
        assert torch.equal(next(results), model(numbered(number)))
    results.close()
    assert torch.equal(run(numbered(7)), model(numbered(7)))
    given = batches(100)
    results = run.map(given, buffersize=3)
    next(results)
    given.close()
    assert len(list(results)) <= 3


@torch.no_grad()
def test_batches_that_call_the_executable(run, model):
    def calling():
        for number in range(4):
            found = run(numbered(number))
            assert torch.equal(found, model(numbered(number)))
            assert len(list(run.map(batches(2)))) == 2
            yield numbered(number)

    for number, one in enumerate(run.map(calling(), buffersize=2)):
        assert torch.equal(one, model(numbered(number)))
    own = []

    def taking():
        yield numbered(0)
        yield next(own[0])

    own.append(run.map(taking()))
    with pytest.raises(ValueError, match="already executing"):
        list(own[0])
    assert torch.equal(run(numbered(3)), model(numbered(3)))


@torch.no_grad()
def test_awaiting_tasks_that_are_cancelled(run, model):
    """Those that are not get their results, and so does a later one."""

    async def one(number):
        found = await run.submit(numbered(number))
        assert torch.equal(found, model(numbered(number)))

    async def all_of_them():
        waiting = [asyncio.create_task(one(number)) for number in range(12)]
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(task, asyncio.CancelledError) for task in found[::2])
        assert found[1::2] == [None] * 6
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run.submit(numbered(1)), 0)
        await one(20)

    asyncio.run(all_of_them())


@torch.no_grad()
def test_closing_in_the_middle_of_a_stream(run, model):
    """The stream ends with right results and then an error; nothing hangs or stays."""
    right, errors, begun = [], [], threading.Event()

    def work():
        with torch.no_grad():
            try:
                for number, one in enumerate(run.map(batches(10**6), buffersize=4)):
                    right.append(torch.equal(one, model(numbered(number))))
                    if number == 5:
                        begun.set()
            except offload.ExecutionError as error:
                errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(WAITING_SECONDS)
    run.close()
    thread.join(WAITING_SECONDS)
    assert not thread.is_alive()
    assert all(right)
    assert len(errors) == 1
    assert "closed" in errors[0]


@pytest.mark.parametrize("kind", Placement)
@torch.no_grad()
def test_launches_that_fail_from_three_threads_with_tickets(kind):
    """Every execution has its own result or error; dependents fail with it; nothing stays."""

    def pick(x, at):
        return torch.index_select(x.sin(), 0, at).cos().exp().tan()

    x, right, wrong = torch.randn(4, 4), torch.tensor([1]), torch.tensor([7])
    captured = offload.capture(pick, x, right)
    costs_ns = None if kind is Placement.STATIC else [2e5, 1e5]
    run = apart(captured.bound, {0: 1, 2: 1}, 2, kind, None, costs_ns)
    outcomes = []

    def submit(seed):
        with torch.no_grad():
            for number in range(20):
                at = wrong if (seed + number) % 3 == 0 else right
                first = run.submit(x, at)
                behind = run.after(first).submit(x, right)
                try:
                    is_right = torch.equal(first.result(WAITING_SECONDS), pick(x, right))
                    outcomes.append(is_right and at is right)
                    outcomes.append(torch.equal(behind.result(WAITING_SECONDS), pick(x, right)))
                except offload.ExecutionError as error:
                    outcomes.append(at is wrong and "index_select" in str(error))
                    with pytest.raises(offload.DependencyError):
                        behind.result(WAITING_SECONDS)
                    outcomes.append(True)

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(WAITING_SECONDS)
    assert len(outcomes) == 120
    assert all(outcomes)
    assert torch.equal(run(x, right), pick(x, right))
    run.close()


@pytest.mark.parametrize("kind", Placement)
@torch.no_grad()
def test_the_child_of_a_fork_executes_whatever_threads_of_the_parent_held(kind, model, captured):
    """Locks that another thread holds at the fork do not exist in the child."""
    run = captured.load([CpuBackend(threads=1)] * 2, placement=str(kind))
    assert torch.equal(run(numbered(1)), model(numbered(1)))
    locks = [run._executions.lock]
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for one in locks:
                stack.enter_context(one)
            held.set()
            go_on.wait(WAITING_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(WAITING_SECONDS)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs fails
        is_right = False
        with contextlib.suppress(BaseException):
            found = [run(numbered(2)), run.submit(numbered(2)).result()]
            is_right = all(torch.equal(one, model(numbered(2))) for one in found)
        os._exit(0 if is_right else 1)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join(WAITING_SECONDS)
    assert status == 0
    assert torch.equal(run(numbered(3)), model(numbered(3)))
    run.close()


@torch.no_grad()
def test_a_cancelled_dependency_cancels_what_waits_for_it(run, model):
    gate = threading.Event()
    with offload.tasks(max_workers=1) as t:
        t.submit(gate.wait)
        dropped = t.submit(numbered, 1)
        tickets = [run.after(dropped).submit(numbered(0))]
        tickets.append(run.submit(tickets[0]))
        tickets.append(run.after(tickets[0]).submit(numbered(0)))
        is_cancelled = dropped.cancel()
        gate.set()
    assert is_cancelled
    for one in tickets:
        with pytest.raises(concurrent.futures.CancelledError):
            one.result(WAITING_SECONDS)
        assert one.cancelled()

        async def awaited(one=one):
            return await one

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(awaited())
    assert torch.equal(run(numbered(5)), model(numbered(5)))


@torch.no_grad()
def test_the_cause_is_the_first_error_at_the_end_of_a_chain(run, model):
    def refuse():
        raise Refused

    with offload.tasks() as t:
        ticket = t.submit(refuse)
        assert isinstance(ticket.exception(WAITING_SECONDS), Refused)
    for _ in range(4):
        ticket = run.after(ticket).submit(numbered(0))
        error = ticket.exception(WAITING_SECONDS)
        assert isinstance(error, offload.DependencyError)
        assert isinstance(error.__cause__, Refused)
    assert torch.equal(run(numbered(5)), model(numbered(5)))
