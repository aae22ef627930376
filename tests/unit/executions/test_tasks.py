"""Tasks: a DAG over executables and callables, its results, order and errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading

import pytest
import torch
from task_callables import WAITING_SECONDS, Refused, refuse

import offload
from offload.run import Ticket

N_IN_CHAIN = 2_000


def wait_at(gate: threading.Event) -> torch.Tensor:
    assert gate.wait(WAITING_SECONDS)
    return torch.zeros(4)


def test_the_example(run):
    other = offload.capture(lambda x: x * 3, torch.zeros(4)).load()
    with offload.tasks() as t:
        a = t.submit(torch.full, (4,), 2.0)
        b, c = t.submit(run, a), t.submit(other, a)
        d = t.submit(lambda x, y: x + y, b, y=c)
    assert all(one.done() for one in (a, b, c, d))
    assert torch.equal(d.result(), torch.full((4,), 9.0))
    assert asyncio.run(_of(d)) is d.result()


def test_tickets_inside_containers():
    """Executables say what to do; functions receive the tickets."""
    run = offload.capture(lambda given: given["x"] + 1, {"x": torch.zeros(4)}).load()
    with offload.tasks() as t:
        ticket = t.submit(torch.zeros, 4)
        assert t.submit(lambda tickets: tickets, [ticket]).result() == [ticket]
        made = t.submit(run, t.submit(lambda x: {"x": x}, ticket))
        with pytest.raises(offload.BindingError, match=r"\['x'\].*a ticket stands for its result"):
            t.submit(run, {"x": ticket})
        with pytest.raises(offload.BindingError, match="a ticket stands for its result"):
            run({"x": ticket})
    assert torch.equal(made.result(), torch.ones(4))


async def _of(ticket: Ticket) -> object:
    return await ticket


def test_async_with(run):
    async def main() -> torch.Tensor:
        async with offload.tasks() as t:
            ticket = t.submit(run, t.submit(torch.zeros, 4))
            other = t.submit(refuse)
            assert torch.equal(await t.submit(run, ticket), torch.full((4,), 2.0))
            with pytest.raises(Refused):
                await other
        assert ticket.done()
        return ticket.result()

    assert torch.equal(asyncio.run(main()), torch.ones(4))


def test_async_with_raises_what_nobody_was_told(run):
    async def main() -> None:
        async with offload.tasks() as t:
            t.submit(run, t.submit(refuse))

    with pytest.raises(Refused):
        asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_random_graphs(captured, seed):
    """Each task once, after its dependencies, with their results."""
    draw = random.Random(seed)
    runs = [captured.load() for _ in range(3)]
    add = offload.capture(lambda x, y: x + y, torch.zeros(4), torch.zeros(4)).load()
    began: list[int] = []
    values: list[torch.Tensor] = []
    with offload.tasks(max_workers=3, buffersize=draw.choice([None, 1, 4])) as t:
        tickets: list[Ticket] = []
        for index in range(60):
            known = list(zip(tickets, values, strict=True))
            first, second = draw.choices(known, k=2) if known else [(torch.zeros(4),) * 2] * 2
            kind = draw.choice(["executable", "callable", "join"])
            if kind == "executable":
                tickets.append(t.submit(draw.choice(runs), first[0]))
                values.append(first[1] + 1)
            elif kind == "join":
                tickets.append(t.submit(add, first[0], y=second[0]))
                values.append(first[1] + second[1])
            else:
                note = lambda x, y, index=index: began.append(index) or x - y  # noqa: E731
                tickets.append(t.after(*tickets[-2:]).submit(note, first[0], second[0]))
                values.append(first[1] - second[1])
    for ticket, value in zip(tickets, values, strict=True):
        assert torch.equal(ticket.result(), value)
    assert len(began) == len(set(began))


def test_an_error_surfaces_once_with_its_origin(run):
    began = []
    with pytest.raises(Refused) as caught, offload.tasks() as t:  # noqa: PT012
        a = t.submit(refuse)
        b = t.submit(run, a)
        c = t.submit(began.append, b)
        rest = t.submit(run, torch.zeros(4))
    assert caught.value is a.exception()
    assert not began
    for one in (b, c):
        with pytest.raises(offload.DependencyError) as told:
            one.result()
        assert told.value.__cause__ is caught.value
    assert torch.equal(rest.result(), torch.ones(4))
    assert torch.equal(run(torch.zeros(4)), torch.ones(4))


def test_an_error_that_was_told_does_not_surface_again(run):
    with offload.tasks() as t:
        with pytest.raises(Refused):
            t.submit(refuse).result()
        assert isinstance(t.submit(refuse).exception(), Refused)
        with pytest.raises(Refused):
            t.submit(refuse).wait()


def test_several_errors_are_a_group(run):
    with pytest.raises(ExceptionGroup) as caught, offload.tasks() as t:  # noqa: PT012
        for number in range(3):
            t.submit(run, t.submit({}.__getitem__, number))
    assert [error.args for error in caught.value.exceptions] == [(0,), (1,), (2,)]


def test_what_the_block_raises_cancels_the_rest(run, gate):
    began = []
    with pytest.raises(Refused), offload.tasks(max_workers=1) as t:  # noqa: PT012
        first = t.submit(wait_at, gate)
        waiting = [t.submit(began.append, 1), t.submit(run, first)]
        while not first.running():
            pass
        threading.Timer(0.01, gate.set).start()
        raise Refused
    assert torch.equal(first.result(), torch.zeros(4))
    assert all(one.cancelled() for one in waiting)
    assert not began


def test_a_cancelled_task_does_not_begin(run, gate):
    began = []
    with offload.tasks(max_workers=1) as t:
        t.submit(wait_at, gate)
        queued = t.submit(began.append, 1)
        behind = t.submit(run, queued)
        assert queued.cancel()
        gate.set()
    assert not began
    assert behind.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        behind.result()


def test_a_callable_calls_the_executable_that_waits_for_it():
    """Also where executions leave results, and none may overtake another."""

    def accumulate(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.add_(x).clone()

    run = offload.capture(accumulate, torch.zeros(1), torch.zeros(1)).load()
    total = torch.zeros(1)

    def work() -> torch.Tensor:
        return run(torch.ones(1), total) + run.submit(torch.ones(1), total).result()

    with offload.tasks() as t:
        a = t.submit(work)
        b = t.submit(run, a, total)
        c = t.submit(run, torch.ones(1), total)
    assert [one.result().item() for one in (a, b, c)] == [3.0, 5.0, 6.0]


def test_steps_that_write_keep_their_order():
    """However long each step's preparation takes."""

    def accumulate(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.mul_(2).add_(x).clone()

    run = offload.capture(accumulate, torch.zeros(1), torch.zeros(1)).load()
    total = torch.zeros(1)
    events = [threading.Event() for _ in range(4)]

    def prepare(number: int) -> torch.Tensor:
        if number < 3:
            assert events[number + 1].wait(WAITING_SECONDS)  # the later one ends before
        events[number].set()
        return torch.tensor([float(number)])

    with offload.tasks(max_workers=4) as t:
        steps = [t.submit(run, t.submit(prepare, number), total) for number in range(4)]
    assert [one.result().item() for one in steps] == [0.0, 1.0, 4.0, 11.0]


def test_grad_mode_goes_along(run):
    with offload.tasks() as t:
        with torch.no_grad():
            off = t.submit(torch.is_grad_enabled)
        on = t.submit(torch.is_grad_enabled)
    assert (off.result(), on.result()) == (False, True)


def test_operators_have_as_many_threads_as_where_it_was_submitted(captured):
    """Deferred or not: bits may depend on it."""
    seen = []
    library = torch.library.Library("offload_tests_tasks", "FRAGMENT")
    library.define("threads(Tensor x) -> Tensor")

    def threads(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x + 1

    library.impl("threads", threads, "CPU")
    n_threads = torch.get_num_threads()
    try:
        run = offload.capture(torch.ops.offload_tests_tasks.threads, torch.zeros(4)).load()
        run(torch.zeros(4))
        torch.set_num_threads(2)
        with offload.tasks() as t:
            t.submit(run, t.submit(torch.zeros, 4)).wait()
        assert seen[-1] == 2
    finally:
        torch.set_num_threads(n_threads)
        library._destroy()


def test_an_executable_that_is_closed_meanwhile(captured, gate):
    run = captured.load()

    def close() -> torch.Tensor:
        assert gate.wait(WAITING_SECONDS)
        run.close()
        return torch.zeros(4)

    with pytest.raises(offload.ExecutionError, match="closed"), offload.tasks() as t:  # noqa: PT012
        ticket = t.submit(run, t.submit(close))
        gate.set()
    assert isinstance(ticket.exception(), offload.ExecutionError)


def test_the_processor_has_no_events(run):
    with pytest.raises(offload.BackendUnavailable, match="whose streams torch knows"):
        run.submit(torch.zeros(4)).event()


def test_an_interrupt_in_the_block_leaves_it(run):
    with pytest.raises(KeyboardInterrupt), offload.tasks() as t:  # noqa: PT012
        ticket = t.submit(run, torch.zeros(4))
        raise KeyboardInterrupt
    assert ticket.done()


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_an_exit_of_a_callable_is_raised_once(run, raised):
    """Its dependents have the same exception."""

    def leave():
        raise raised

    with pytest.raises(raised), offload.tasks() as t:  # noqa: PT012
        left = t.submit(leave)
        t.submit(run, left)
        t.submit(torch.clone, left)


def test_callbacks_on_threads_of_callables_do_not_wait():
    """The only thread would wait for a callable that it has to call."""
    go_on, ended, errors = threading.Event(), threading.Event(), []

    def wait(_):
        try:
            later.result(60)
        except offload.ExecutionError as error:
            errors.append(str(error))
        ended.set()

    with offload.tasks(max_workers=1) as t:
        first = t.submit(go_on.wait, 60)
        later = t.submit(lambda: 1)
        first.add_done_callback(wait)
        go_on.set()
    assert ended.wait(60)
    assert later.result() == 1
    assert len(errors) == 1
    assert "a done-callback waits" in errors[0]


@pytest.mark.parametrize("outcome", ["result", "error", "cancelled"])
@pytest.mark.parametrize("begins_behind", ["executions", "callables", "both"])
def test_long_chains_end(run, gate, outcome, begins_behind):
    """Behind a task that ends last: each dependent is ended by the one before."""

    def first() -> torch.Tensor:
        gate.wait(WAITING_SECONDS)
        if outcome == "error":
            raise Refused
        return torch.zeros(4)

    with offload.tasks(max_workers=1) as t:
        t.submit(gate.wait, WAITING_SECONDS)
        tickets = [t.submit(first)]
        for at in range(N_IN_CHAIN):
            is_called = begins_behind == "callables" or (begins_behind == "both" and at % 2)
            tickets.append(t.submit(torch.clone if is_called else run, tickets[-1]))
        if outcome == "cancelled":
            assert tickets[0].cancel()
        gate.set()
        if outcome == "error":
            assert isinstance(tickets[0].exception(), Refused)
    assert all(one.done() for one in tickets)
    if outcome == "result":
        n_additions = {"executions": N_IN_CHAIN, "callables": 0, "both": N_IN_CHAIN // 2}
        assert torch.equal(tickets[-1].result(), torch.full((4,), 1.0 * n_additions[begins_behind]))
    elif outcome == "error":
        cause = tickets[-1].exception().__cause__
        assert isinstance(cause, Refused)
    else:
        assert all(one.cancelled() for one in tickets)
