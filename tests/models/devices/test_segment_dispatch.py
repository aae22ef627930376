"""`placement="dynamic"`: segments begin when they are ready, and leave devices that are late."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from apart import apart, apart_devices
from checks import normal
from copies import before_copies
from on_lanes import Towers
from two_branches import TwoBranches

import offload
from offload.backends import CpuBackend
from offload.native import _native
from offload.run import Ticket, segment_dispatch, weight_refresh
from offload.run.device_choice import Placement

DYNAMIC = Placement.DYNAMIC
WAITING_SECONDS = 60


def dynamic(captured, costs_ns=(2e5, 1e5), n=2, devices=None):
    return apart(captured.bound, {0: 1}, n, DYNAMIC, devices, list(costs_ns))


@torch.no_grad()
def test_what_waits_for_a_device_that_stalls_goes_to_the_idle_one(monkeypatch):
    """A segment on the quicker device waits for a ticket; the other executions end all the same."""
    model = Towers(32, 3, n=1)
    captured = offload.capture(model, normal(4, 32))
    stall, n_stalled = Ticket(), []

    def tickets(self, memories, ready, number):
        n_stalled.append(number)
        return {run._queue.home: (stall,)} if len(n_stalled) == 1 else {}

    monkeypatch.setattr(weight_refresh.WeightRefresh, "tickets", tickets)
    with dynamic(captured, (1e5, 1.2e5)) as run:
        inputs = [normal(4, 32) for _ in range(6)]
        expected = [model(x) for x in inputs]
        tickets = [run.submit(x) for x in inputs]
        concurrent.futures.wait([one.future() for one in tickets[1:]], WAITING_SECONDS)
        assert [one.done() for one in tickets] == [False] + 5 * [True]
        assert run._dispatcher.n_under_way == 1
        stall._set_result(None)
        for one, result in zip(tickets, expected, strict=True):
            assert torch.equal(one.result(WAITING_SECONDS), result)
        assert run._dispatcher.n_moved >= 1
        assert "segments were given to another device" in run.explain()


@torch.no_grad()
def test_where_a_refresh_of_weights_fails_the_execution_has_its_error(monkeypatch):
    model, x = Towers(32, 3, n=1), normal(4, 32)
    captured = offload.capture(model, x)
    failing = Ticket()

    with dynamic(captured, (1e5, 1.2e5)) as run:
        found = dict.fromkeys(run._queue.memories, (failing,))
        with monkeypatch.context() as patch:
            patch.setattr(run._queue.weights, "tickets", lambda *_: found)
            ticket = run.submit(x)
        failing._set_error(offload.ExecutionError("no weights"))
        with pytest.raises(offload.DependencyError) as error:
            ticket.result(WAITING_SECONDS)
        assert "no weights" in str(error.value.__cause__)
        assert torch.equal(run(x), model(x))


@torch.no_grad()
def test_many_threads_while_devices_slow_down():
    model = Towers(32, 3, n=2)
    captured = offload.capture(model, normal(4, 32))
    wrong = []
    with dynamic(captured, (1e5, 1.1e5)) as run:

        def call(seed):
            with torch.no_grad():
                for number in range(40):
                    x = torch.full((4, 32), float(seed * 100 + number))
                    if not torch.equal(run(x), model(x)):
                        wrong.append(x)

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
        for one in threads:
            one.start()
        for number in range(20):
            for one in run.segments:
                for device in (0, 1):
                    share = 0.3 if (number + device) % 2 else 1.0
                    _native.set_share(one.runs[device]._loaded.resident, 1, share)
            threading.Event().wait(0.005)
        for one in threads:
            one.join(WAITING_SECONDS)
        assert not any(one.is_alive() for one in threads)
        assert not wrong
        assert run._dispatcher.n_under_way == 0


@pytest.mark.parametrize("nth", range(1, 4))
@torch.no_grad()
def test_copies_that_fail_from_three_threads_with_tickets(nth):
    """Each execution is right or has the error; the device is refused afterwards; nothing hangs."""
    model = TwoBranches()
    captured = offload.capture(model, normal(4, 8))
    n_copies, lock = itertools.count(1), threading.Lock()

    def fail(_):
        with lock:
            n = next(n_copies)
        if n % (3 + nth) == nth:
            raise RuntimeError("injected")

    with dynamic(captured, (2e5, 1e3)) as run:
        run(normal(4, 8))
        outcomes, threads = [], []

        def submit(seed):
            with torch.no_grad():
                for number in range(10):
                    x = torch.full((4, 8), float(seed + number))
                    before = run.submit(x)
                    after = run.after(before).submit(x)
                    for one in (before, after):
                        try:
                            found = one.result(WAITING_SECONDS)
                            outcomes.append(all(map(torch.equal, found, model(x))))
                        except (offload.ExecutionError, offload.DependencyError) as error:
                            outcomes.append("injected" in f"{error} {error.__cause__}")

        with before_copies(fail):
            for seed in range(3):
                threads.append(threading.Thread(target=submit, args=(seed,)))
                threads[-1].start()
            for one in threads:
                one.join(WAITING_SECONDS)
        assert len(outcomes) == 60
        assert all(outcomes)
        x = normal(4, 8)
        assert all(map(torch.equal, run(x), model(x)))  # host memory recovers
        assert run._dispatcher.n_under_way == 0


@pytest.fixture
def steps():
    """An operator that calls a function with its number, which may raise or wait."""
    called = {"with": lambda number: None}

    def step(x, number):
        called["with"](number)
        return x * 2 + number

    with torch.library._scoped_library("dispatch_tests", "FRAGMENT") as library:
        library.define("step(Tensor x, int number) -> Tensor")
        library.impl("step", step, "CPU")
        library.impl("step", lambda x, number: torch.empty_like(x), "Meta")
        yield called


class Steps(torch.nn.Module):
    """Two chains that meet."""

    def forward(self, x):
        left, right = x, x + 1
        for number in range(3):
            left = torch.ops.dispatch_tests.step(left, number)
            right = torch.ops.dispatch_tests.step(right, 3 + number)
        return torch.ops.dispatch_tests.step(left + right, 6), left


@torch.no_grad()
def test_a_launch_that_fails_fails_its_execution_alone(steps):
    model, x = Steps(), normal(4, 8)
    captured = offload.capture(model, x)
    with dynamic(captured, (1e5, 1.1e5)) as run:
        for failing in range(7):

            def fail(number, failing=failing):
                if number == failing:
                    raise RuntimeError(f"step {number}")

            for call in (run, lambda *args: run.submit(*args).result(WAITING_SECONDS)):
                steps["with"] = fail
                with pytest.raises(offload.ExecutionError, match=f"step {failing}"):
                    call(x)
                steps["with"] = lambda number: None
                assert all(map(torch.equal, call(x), model(x)))
        assert run._dispatcher.n_under_way == 0
        assert run.choice.native_paces.n_under_way == 0


@torch.no_grad()
def test_a_launch_that_executes_its_own_executable_is_refused(steps):
    """It would wait for its own device, so no way to execute or to submit hangs."""
    model, x = Steps(), normal(4, 8)
    captured = offload.capture(model, x)
    message = "executes the executable itself"
    with dynamic(captured, (1e5, 1.1e5)) as run, dynamic(captured, (1e5, 1.1e5)) as other:
        expected, ended = model(x), other.submit(x)
        ended.result()
        for inner in (
            lambda: run(x),
            lambda: run.submit(x),
            lambda: run.after(ended).submit(x),
            lambda: list(run.map([x])),
        ):

            def call(number, inner=inner):
                steps["with"] = lambda number: None
                inner()

            for outer in (run, lambda *args: run.submit(*args).result(WAITING_SECONDS)):
                steps["with"] = call
                with pytest.raises(offload.ExecutionError, match=message):
                    outer(x)
                assert all(map(torch.equal, run(x), expected))

        def call_other(number):
            steps["with"] = lambda number: None
            assert all(map(torch.equal, other(x), expected))

        steps["with"] = call_other
        assert all(map(torch.equal, run(x), expected))


@torch.no_grad()
def test_an_execution_whose_segment_is_refused_has_the_error():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    for is_last in (False, True):
        with dynamic(captured, (2e5, 1e3)) as run:
            assert all(map(torch.equal, run(x), model(x)))
            for one in run.segments[-int(is_last)].runs:
                one.close()
            for call in (run, lambda *args, run=run: run.submit(*args).result(WAITING_SECONDS)):
                with pytest.raises(offload.ExecutionError, match="closed"):
                    call(x)
            assert run._dispatcher.n_under_way == 0


@torch.no_grad()
def test_the_callers_memory_may_be_that_of_any_device():
    """Memories have the same numbers in decisions and in copies."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    first = apart_devices(3)
    for home in range(3):
        devices = dataclasses.replace(first, home=home)
        for costs_ns in ((2e5, 1e3, 1e4), (1e3, 2e5, 1e4), (1e4, 2e5, 1e3)):
            with dynamic(captured, costs_ns, 3, devices) as run:
                for call in (run, lambda *args, run=run: run.submit(*args).result()):
                    assert all(map(torch.equal, call(x), model(x)))


@torch.no_grad()
def test_closing_waits_for_segments_that_have_not_begun():
    model, x = Towers(32, 3, n=1), normal(4, 32)
    run = dynamic(offload.capture(model, x))
    tickets = [run.submit(x) for _ in range(20)]
    run.close()
    assert all(one.done() for one in tickets)
    for one in tickets:
        assert torch.equal(one.result(), model(x))
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(x)


@torch.no_grad()
def test_an_execution_that_has_ended_is_freed(monkeypatch):
    """Nothing refers to it, not even in a cycle that no garbage collector sees."""
    model, x = TwoBranches(), normal(4, 8)
    with dynamic(offload.capture(model, x)) as run:
        orders = []
        add = segment_dispatch.CopyOrder

        def order(*args):
            made = add(*args)
            ready = weakref.ref(made.ready)
            orders.append(ready)
            return made

        monkeypatch.setattr(segment_dispatch, "CopyOrder", order)
        monkeypatch.setattr(type(run._queue.home), "mark", lambda _: Marked())
        for _ in range(3):
            run(x)
            run.submit(x).result(WAITING_SECONDS)
        end = time.monotonic() + WAITING_SECONDS
        while any(one() is not None for one in orders) and time.monotonic() < end:
            time.sleep(0.001)
        assert len(orders) == 6
        assert all(one() is None for one in orders)


class Marked:
    """An event of the host."""


@torch.no_grad()
def test_the_child_of_a_fork_executes_while_executions_of_the_parent_are_under_way(monkeypatch):
    model, x = Towers(32, 3, n=1), normal(4, 32)
    captured = offload.capture(model, x)
    stall = Ticket()
    with dynamic(captured, (1e5, 1.2e5)) as run:
        expected = model(x)
        found = dict.fromkeys(run._queue.memories, (stall,))
        with monkeypatch.context() as patch:
            patch.setattr(run._queue.weights, "tickets", lambda *_: found)
            ticket = run.submit(x)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that hangs fails
            is_right = False
            with contextlib.suppress(BaseException):
                devices = dict.fromkeys(run._queue.memories)
                is_right = ticket.done() and bool(devices)
                if len(devices) == 1:
                    is_right &= torch.equal(run(x), expected)
                is_right &= run._dispatcher.n_under_way == 0
            os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        stall._set_result(None)
        assert torch.equal(ticket.result(WAITING_SECONDS), expected)
        assert torch.equal(run(x), expected)


@torch.no_grad()
def test_devices_that_share_memory():
    model, x = Towers(32, 3, n=1), normal(4, 32)
    captured = offload.capture(model, x)
    with captured.load([CpuBackend(threads=1)] * 2, placement="dynamic") as run:
        inputs = [normal(4, 32) for _ in range(20)]
        for one, found in zip(inputs, run.map(inputs, buffersize=5), strict=True):
            assert torch.equal(found, model(one))
