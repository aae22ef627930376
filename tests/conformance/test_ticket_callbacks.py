"""Who is told of a ticket's end, on every backend: callbacks, futures, coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest
import torch
from chains import chain, same

import offload
from offload import Ticket


def test_callbacks(backend, load):
    run = load(chain, torch.ones(8))
    ended, called = Ticket(), []
    ticket = run.submit(ended)
    for number in range(3):
        ticket.add_done_callback(lambda one, number=number: called.append((number, one)))
    assert not called
    ended._set_result(torch.ones(8))
    ticket.wait()
    last = run.submit(torch.ones(8))
    last.wait()  # after it, on the same thread
    ticket.add_done_callback(lambda one: called.append((3, one)))
    assert called == [(number, ticket) for number in range(4)]


def test_a_callback_that_raises_leaves_the_others(load, monkeypatch):
    run = load(chain, torch.ones(8))
    ended, called, told = Ticket(), [], []
    monkeypatch.setattr("sys.unraisablehook", lambda args: told.append(args.exc_value))
    ticket = run.submit(ended)
    ticket.add_done_callback(lambda _: {}["no such key"])
    ticket.add_done_callback(called.append)
    ended._set_result(torch.ones(8))
    ticket.wait()
    run.submit(torch.ones(8)).wait()  # after it, on the same thread
    assert called == [ticket]
    assert [type(one) for one in told] == [KeyError]


def test_a_callback_submits(backend, load):
    run = load(chain, torch.ones(8))
    follower: concurrent.futures.Future[Ticket] = concurrent.futures.Future()
    x = torch.randn(8)
    run.submit(x).add_done_callback(lambda one: follower.set_result(run.submit(one)))
    assert same(backend, follower.result(60).result(), chain(chain(x)))


def test_a_callback_that_waits_is_refused(backend, load):
    run = load(chain, torch.ones(8))
    told: concurrent.futures.Future[object] = concurrent.futures.Future()
    ended, x = Ticket(), torch.randn(8)

    def wait(_: Ticket) -> None:
        try:
            told.set_result(run.submit(Ticket()).result())
        except BaseException as error:
            told.set_exception(error)

    first = run.submit(ended)
    first.add_done_callback(wait)
    ended._set_result(x)
    with pytest.raises(offload.ExecutionError, match="done-callback"):
        told.result(60)
    assert same(backend, run.submit(x).result(), chain(x))


def test_futures(backend, load):
    run = load(chain, torch.ones(8))
    failed = Ticket()
    inputs = [torch.randn(8) for _ in range(5)]
    futures = {run.submit(x).future(): x for x in inputs}
    for one in concurrent.futures.as_completed(futures, timeout=60):
        assert same(backend, one.result(), chain(futures[one]))
    broken = run.submit(failed).future()
    failed._set_error(KeyError("no such batch"))
    done, rest = concurrent.futures.wait([broken], timeout=60)
    assert done == {broken}
    assert not rest
    assert isinstance(broken.exception(), offload.DependencyError)


def test_await(backend, load):
    run = load(chain, torch.ones(8))
    inputs = [torch.randn(8) for _ in range(20)]

    async def main() -> None:
        for x in inputs:
            assert same(backend, await run.submit(x), chain(x))
        results = await asyncio.gather(*(run.submit(run.submit(x)) for x in inputs))
        for x, result in zip(inputs, results, strict=True):
            assert same(backend, result, chain(chain(x)))

    asyncio.run(main())


def test_await_of_what_ends_later(backend, load):
    run = load(chain, torch.ones(8))

    async def main() -> None:
        ended, cancelled, failed = Ticket(), Ticket(), Ticket()
        waits = [asyncio.ensure_future(_of(run.submit(one))) for one in (ended, cancelled, failed)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_of(run.submit(Ticket())), timeout=0.05)
        assert not any(one.done() for one in waits)
        ended._set_result(torch.ones(8))
        assert same(backend, await waits[0], chain(torch.ones(8)))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[1]
        failed._set_error(ValueError("the origin"))
        with pytest.raises(offload.DependencyError):
            await waits[2]

    asyncio.run(main())


async def _of(ticket: Ticket) -> object:
    return await ticket


def test_cancelling_who_awaits_cancels_what_has_not_begun(load):
    run = load(chain, torch.ones(8))

    async def main() -> None:
        ended = Ticket()
        ticket = run.submit(ended)
        waiting = asyncio.ensure_future(_of(ticket))
        for _ in range(20):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ticket.cancelled()
        ended._set_result(torch.ones(8))

    asyncio.run(main())
    assert run.last_execution.n_executions == 0
