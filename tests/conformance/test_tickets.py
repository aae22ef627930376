"""Tickets on every backend: dependencies, ends and waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import textwrap
import weakref

import pytest
import torch
from chains import PREAMBLE, chain, preamble_on, run_script, same

import offload
from offload import Ticket


def accumulate(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.mul_(2).add_(x)
    return state.clone()


def test_a_ticket_is_an_argument(backend, load):
    first, second = load(chain, torch.ones(8)), load(torch.cos, torch.ones(8))
    x = torch.randn(8)
    tickets = [second.submit(first.submit(x)) for _ in range(20)]
    for ticket in tickets:
        assert same(backend, ticket.result(), chain(x).cos())
    assert first.last_execution.n_executions == 20
    assert second.last_execution.n_executions == 20


def test_a_chain_within_one_executable(backend, load):
    run = load(torch.sin, torch.ones(8))
    x = expected = torch.randn(8)
    ticket = run.submit(x)
    for _ in range(30):
        ticket, expected = run.submit(ticket), expected.sin()
    assert same(backend, ticket.result(), expected.sin())


@pytest.mark.slow
def test_links_of_a_chain_may_be_dropped(backend, load):
    """The next link reads a result in separate memory after the ticket of that result is gone."""
    run = load(lambda x: x + 1, torch.zeros(4096))
    ticket = run.submit(torch.zeros(4096))
    for _ in range(50):
        ticket = run.submit(ticket)
        gc.collect()
    assert same(backend, ticket.result(), torch.full((4096,), 51.0))


def test_a_diamond(backend, load):
    run = load(lambda x: x + 1, torch.ones(8))
    join = load(lambda x, y: x - y, torch.ones(8), torch.ones(8))
    a = run.submit(torch.ones(8))
    b, c = run.submit(a), run.submit(a)
    assert same(backend, join.submit(y=run.submit(b), x=c).result(), torch.full((8,), -1.0))


def test_the_same_ticket_twice(backend, load):
    join = load(torch.mul, torch.ones(8), torch.ones(8))
    double = load(lambda x: x * 2, torch.ones(8))
    a = double.submit(torch.ones(8))
    assert same(backend, join.submit(a, a).result(), torch.full((8,), 4.0))


def test_after(backend, load):
    run = load(accumulate, torch.ones(1), torch.zeros(1))
    other = load(lambda state: state * 1, torch.zeros(1))
    state = torch.zeros(1)
    seen = []
    for step in range(10):
        written = run.submit(torch.tensor([float(step)]), state)
        seen.append(other.after(written).submit(state))
        run.after(seen[-1]).submit(torch.zeros(1), state)
    if backend.capabilities.computes:
        expected, values = 0.0, []
        for step in range(10):
            expected = expected * 2 + step
            values.append(expected)
            expected *= 2
        assert [one.result().item() for one in seen] == values


def test_a_promise_is_waited_for(backend, load):
    run = load(chain, torch.ones(8))
    ended = Ticket()
    tickets = [run.submit(ended), run.after(ended).submit(torch.ones(8))]
    assert not any(one.done() or one.running() for one in tickets)
    x = torch.randn(8)
    assert same(backend, run(x), chain(x))  # nothing blocks it
    ended._set_result(x)
    assert same(backend, tickets[0].result(), chain(x))
    assert same(backend, tickets[1].result(), chain(torch.ones(8)))


def test_what_writes_is_not_overtaken(backend, load):
    """Neither later submissions nor calls overtake, though their arguments are known at once."""
    run = load(accumulate, torch.ones(1), torch.zeros(1))
    state, ended = torch.zeros(1), Ticket()
    tickets = [run.submit(ended, state), run.submit(torch.tensor([2.0]), state)]
    assert not any(one.done() for one in tickets)
    third = torch.tensor([3.0])  # a default device holds for this thread alone
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        called = pool.submit(lambda: run(third, state).clone())
        ended._set_result(torch.tensor([1.0]))
        result = called.result()
    if backend.capabilities.computes:
        assert [one.result().item() for one in tickets] == [1.0, 4.0]
        assert result.item() == 11.0


def test_what_does_not_fit_is_the_error_of_the_ticket(backend, load):
    run = load(chain, torch.ones(8))
    ended = Ticket()
    ticket = run.submit(ended)
    behind = run.submit(ticket)
    ended._set_result(torch.ones(9))
    with pytest.raises(offload.BindingError, match="x"):
        ticket.result()
    with pytest.raises(offload.DependencyError) as caught:
        behind.result()
    assert isinstance(caught.value.__cause__, offload.BindingError)
    assert run.last_execution.n_executions == 0
    assert same(backend, run(torch.ones(8)), chain(torch.ones(8)))


def test_an_error_fails_what_depends_on_it_and_nothing_else(backend, load):
    run = load(lambda x: x + 1, torch.ones(8))
    failed = Ticket()
    chain_of = [run.submit(failed)]
    chain_of += [run.submit(chain_of[0]), run.after(failed).submit(torch.ones(8))]
    rest = run.submit(torch.ones(8))
    failed._set_error(ValueError("the origin"))
    for one in chain_of:
        with pytest.raises(offload.DependencyError) as caught:
            one.result()
        assert isinstance(caught.value.__cause__, ValueError)  # the origin, not the preceding link
        assert isinstance(one.exception(), offload.DependencyError)
        assert not one.cancelled()
    assert same(backend, rest.result(), torch.full((8,), 2.0))
    assert run.last_execution.n_executions == 1


def test_cancel_what_waits(backend, load):
    run = load(chain, torch.ones(8))
    ended = Ticket()
    ticket = run.submit(ended)
    behind = run.submit(ticket)
    assert ticket.cancel()
    assert ticket.cancel()  # it is cancelled
    assert ticket.done()
    for one in (ticket, behind):
        with pytest.raises(concurrent.futures.CancelledError):
            one.result()
        with pytest.raises(concurrent.futures.CancelledError):
            one.exception()
        assert one.cancelled()
    ended._set_result(torch.ones(8))
    assert run.last_execution.n_executions == 0
    assert same(backend, run.submit(ended).result(), chain(torch.ones(8)))


def test_what_has_ended_is_not_cancelled(backend, load):
    run = load(chain, torch.ones(8))
    ticket = run.submit(torch.ones(8))
    ticket.wait()
    assert not ticket.cancel()
    assert not ticket.cancelled()
    assert not ticket.running()
    assert ticket.exception() is None
    assert same(backend, ticket.result(), chain(torch.ones(8)))


def test_a_timeout_leaves_it(backend, load):
    run = load(chain, torch.ones(8))
    ended = Ticket()
    ticket = run.submit(ended)
    for wait in (ticket.wait, ticket.result, ticket.exception):
        with pytest.raises(TimeoutError):
            wait(timeout=0)
    ended._set_result(torch.ones(8))
    assert same(backend, ticket.result(timeout=60), chain(torch.ones(8)))


def test_map_keeps_the_order_and_the_bound(backend, load):
    run = load(lambda x, y: x + y, torch.ones(8), torch.ones(8))
    taken: list[int] = []
    given = []

    def batches():
        for number in range(12):
            taken.append(number)
            x = torch.full((8,), float(number))
            yield (x, torch.ones(8)) if number % 2 else {"y": torch.ones(8), "x": x}

    for number, result in enumerate(run.map(batches(), buffersize=3)):
        given.append(number)
        assert len(taken) - number <= 4  # three in flight, and one waiting for its place
        assert same(backend, result, torch.full((8,), number + 1.0))
    assert given == list(range(12))
    assert run.last_execution.n_executions == 12


def test_close_waits_for_what_depends_on_others(backend, load):
    run = load(chain, torch.ones(8))
    ended = Ticket()
    ticket = run.submit(ended)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        closing = pool.submit(run.close)
        ended._set_result(torch.ones(8))
        closing.result(60)
    assert same(backend, ticket.result(), chain(torch.ones(8)))
    with pytest.raises(offload.ExecutionError, match="closed"):
        run.submit(ended)


@pytest.mark.slow
def test_fork_with_what_waits(backend):
    """In the child nothing ends pending tickets, and executables work, also those that write."""
    done = run_script(
        preamble_on(backend)
        + textwrap.dedent(
            """
            g = lambda x, state: state.add_(x)
            with offload.capture(g) as captured:
                captured(x.clone(), x.clone())
            writes, state = captured.load(device={device!r}), x.clone()
            ended = offload.Ticket()
            tickets = [run.submit(ended), writes.submit(ended, state), writes.submit(x, state)]
            tickets.append(run.submit(tickets[0]))
            child = os.fork()
            if child == 0:
                for ticket in tickets:
                    try:
                        ticket.wait()
                        os._exit(1)
                    except offload.ExecutionError as error:
                        assert "forked" in str(error), error
                ok = run.submit(x).result().shape == x.shape
                ok &= writes.submit(x, state).result().shape == x.shape
                os._exit(0 if ok and writes(x, state) is state else 2)
            assert os.waitpid(child, 0)[1] == 0
            ended._set_result(x)
            for ticket in tickets:
                ticket.wait()
            """
        ).replace("{device!r}", repr(backend.name))
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_fork_while_another_thread_submits_and_loads():
    """Who submits or loads holds the GIL, and the thread that forks needs it."""
    done = run_script(
        PREAMBLE.format(device="cpu", records="cpu")
        + textwrap.dedent(
            """
            ended = threading.Event()

            def submit():
                while not ended.is_set():
                    run.submit(x).result()
                    captured.load().submit(x).result()

            other = threading.Thread(target=submit)
            other.start()
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            ended.set()
            other.join()
            """
        )
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_kept(backend, load):
    """No object is kept by a chain, nor by a ticket that failed, was cancelled or awaited."""
    run = load(lambda x: x + 1, torch.ones(8))
    x = torch.ones(8)
    alive = weakref.ref(x)
    failed, cancelled = Ticket(), Ticket()
    tickets = [run.submit(x), run.after(failed).submit(x), run.after(cancelled).submit(x)]
    tickets.append(run.submit(tickets[0]))
    tickets[0].add_done_callback(lambda _: None)
    failed._set_error(ValueError("the origin"))
    cancelled.cancel()
    tickets[3].wait()

    async def main(ticket: Ticket) -> None:
        await ticket

    asyncio.run(main(run.submit(x)))
    del tickets, x
    run(torch.ones(8))  # after all submissions
    gc.collect()
    if backend.name in (
        "cpu",
        "null",
    ):  # a device releases where it finishes, on a separate thread
        assert alive() is None


def test_a_failed_launch_fails_what_is_queued_behind_it(backend, load):
    if not backend.capabilities.computes:
        pytest.skip("a device that computes nothing has no failing launch")
    lookup = load(lambda table, index: table[index], torch.ones(4), torch.tensor([1, 2]))
    double = load(lambda x: x * 2, torch.ones(2))
    ticket = lookup.submit(torch.arange(4.0), torch.tensor([1, 9]))
    behind = double.submit(double.submit(ticket))
    with pytest.raises(offload.DependencyError) as caught:
        behind.result()
    assert isinstance(caught.value.__cause__, offload.ExecutionError)
    assert not isinstance(caught.value.__cause__, offload.DependencyError)
    if not backend.capabilities.queues_work:
        assert double.last_execution.n_executions == 0
        right = lookup.submit(torch.arange(4.0), torch.tensor([3, 0]))
        assert torch.equal(double.submit(right).result(), torch.tensor([6.0, 0.0]))
