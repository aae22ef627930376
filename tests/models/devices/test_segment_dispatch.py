"""`placement="dynamic"`: segments begin when they are ready, and leave devices that are late."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch
from apart import apart
from checks import normal
from on_lanes import Towers
from test_device_memory import Small

import offload
from offload.backends import CpuBackend
from offload.errors import PlanError
from offload.native import _native
from offload.plan.check_dispatch import DispatchCheck, DispatchRules
from offload.run import Ticket, segment_dispatch, transfers
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
    begun, stall = segment_dispatch.SegmentDispatcher._begun, Ticket()
    stalled: list[int] = []

    def begin(self, execution, segment, device):
        if device == 0 and not stalled:
            stalled.append(execution.number)
            execution.refreshed = {self._queue.memories[0]: (stall,)}
        return begun(self, execution, segment, device)

    with dynamic(captured, (1e5, 1.2e5)) as run:
        inputs = [normal(4, 32) for _ in range(6)]
        expected = [model(x) for x in inputs]
        assert torch.equal(run(inputs[0]), expected[0])
        run.choice._paces[:] = [1.0, 1.0]
        monkeypatch.setattr(segment_dispatch.SegmentDispatcher, "_begun", begin)
        tickets = [run.submit(x) for x in inputs]
        concurrent.futures.wait([one.future() for one in tickets[1:]], WAITING_SECONDS)
        assert stalled
        assert [one.done() for one in tickets] == [False] + 5 * [True]
        stall._set_result(None)
        for one, result in zip(tickets, expected, strict=True):
            assert torch.equal(one.result(WAITING_SECONDS), result)
        assert run._dispatcher.n_moved >= 1
        assert "segments were given to another device" in run.explain()


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
        assert not run._dispatcher._executions


@pytest.mark.parametrize("nth", range(1, 4))
@torch.no_grad()
def test_copies_that_fail_from_three_threads_with_tickets(nth, monkeypatch):
    """Each execution is right or has the error; the device is refused afterwards; nothing hangs."""
    model = Small()
    captured = offload.capture(model, normal(4, 8))
    copy, n_copies, lock = transfers._copy, [0], threading.Lock()
    with dynamic(captured, (2e5, 1e3)) as run:
        run(normal(4, 8))

        def failing(piece):
            with lock:
                n_copies[0] += 1
                is_nth = n_copies[0] % (3 + nth) == nth
            if is_nth:
                raise RuntimeError("injected")
            copy(piece)

        monkeypatch.setattr(transfers, "_copy", failing)
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

        for seed in range(3):
            threads.append(threading.Thread(target=submit, args=(seed,)))
            threads[-1].start()
        for one in threads:
            one.join(WAITING_SECONDS)
        assert len(outcomes) == 60
        assert all(outcomes)
        monkeypatch.setattr(transfers, "_copy", copy)
        x = normal(4, 8)
        assert all(map(torch.equal, run(x), model(x)))  # host memory recovers
        assert not run._dispatcher._executions


@torch.no_grad()
def test_a_segment_that_is_refused_fails_its_execution_alone(monkeypatch):
    model, x = Small(), normal(4, 8)
    captured = offload.capture(model, x)
    with dynamic(captured, (2e5, 1e3)) as run:
        begun, refused = segment_dispatch.SegmentDispatcher._begun, []

        def refuse(self, execution, segment, device):
            if refused and segment == refused[0]:
                raise offload.BindingError("not this one")
            return begun(self, execution, segment, device)

        monkeypatch.setattr(segment_dispatch.SegmentDispatcher, "_begun", refuse)
        for segment in range(len(run.segments)):
            refused[:] = [segment]
            for call in (run, lambda *args: run.submit(*args).result(WAITING_SECONDS)):
                with pytest.raises(offload.BindingError, match="not this one"):
                    call(x)
            refused.clear()
            assert all(map(torch.equal, run(x), model(x)))


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
def test_devices_that_share_memory():
    model, x = Towers(32, 3, n=1), normal(4, 32)
    captured = offload.capture(model, x)
    with captured.load([CpuBackend(threads=1)] * 2, placement="dynamic") as run:
        inputs = [normal(4, 32) for _ in range(20)]
        for one, found in zip(inputs, run.map(inputs, buffersize=5), strict=True):
            assert torch.equal(found, model(one))


def test_the_checker_refuses_every_wrong_step():
    """Segment 0 reads the input, segment 1 what 0 makes; the caller reads what 1 makes."""
    rules = DispatchRules([(0,), (1,)], [(1,), (2,)], [(), (0,)], 0, {2})

    def right():
        check = DispatchCheck(rules)
        yield check
        yield check.copied(-1, 0, 1, (0,))
        yield check.arrived(1, (0,))
        yield check.begun(0, 1)
        yield check.ended(0)
        yield check.begun(1, 1)
        yield check.ended(1)
        yield check.copied(1, 1, 0, (2,))
        yield check.arrived(0, (2,))
        yield check.finished()

    assert len(list(right())) == 10

    def after(n):
        steps = right()
        check = next(steps)
        for _ in range(n):
            next(steps)
        return check

    for n, wrong, message in (
        (0, lambda one: one.begun(0, 1), "lacks"),
        (1, lambda one: one.begun(0, 1), "lacks"),
        (1, lambda one: one.copied(-1, 0, 1, (0,)), "a second time"),
        (2, lambda one: one.copied(-1, 0, 1, (0,)), "a second time"),
        (2, lambda one: one.begun(1, 1), "before segment 0"),
        (3, lambda one: one.begun(0, 1), "a second time"),
        (3, lambda one: one.begun(1, 1), "before segment 0"),
        (3, lambda one: one.copied(0, 1, 0, (1,)), "before it has ended"),
        (4, lambda one: one.begun(1, 0), "lacks"),
        (4, lambda one: one.copied(0, 0, 1, (1,)), "which lacks it"),
        (4, lambda one: one.finished(), "before its segments"),
        (6, lambda one: one.finished(), "the caller reads"),
        (7, lambda one: one.finished(), "the caller reads"),
    ):
        with pytest.raises(PlanError, match=message):
            wrong(after(n))
