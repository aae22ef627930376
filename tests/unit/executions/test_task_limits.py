"""Tasks: limits of what is in flight, input that is refused, and what a block leaves."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch
from task_callables import WAITING_SECONDS, Refused, refuse

import offload
from offload.run import Ticket


def test_count_is_bounded(run):
    at_once, most = itertools.count(1), []
    running = 0
    lock = threading.Lock()

    def work(_: torch.Tensor) -> None:
        nonlocal running
        with lock:
            running += 1
            most.append(running)
        next(at_once)
        with lock:
            running -= 1

    with offload.tasks(max_workers=8, buffersize=2) as t:
        for _ in range(50):
            t.submit(work, torch.zeros(4))
            assert len(t._in_flight) <= 2
    assert max(most) <= 2
    assert len(most) == 50


def test_bytes_are_bounded(run, gate):
    """Two of 32 bytes (argument and result) fit into 64, and a larger one alone."""
    with offload.tasks(buffer_bytes=64) as t:
        first, second = t.submit(run, torch.zeros(4)), t.submit(run, torch.zeros(4))
        third = t.submit(run, torch.zeros(4))
        assert first.done()
        large = t.submit(torch.sum, torch.zeros(1000))
        assert second.done()
        assert third.done()
        t.submit(run, torch.zeros(4))
        assert large.done()


def test_a_callable_submits(run):
    """Its submissions are exempt from limits, as others would wait for it."""
    with offload.tasks(max_workers=1, buffersize=1) as t:
        inner = t.submit(lambda: t.submit(run, torch.zeros(4)))
    assert torch.equal(inner.result().result(), torch.ones(4))


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"buffersize": 0}, "buffersize"),
        ({"buffer_bytes": 0.5}, "buffer_bytes"),
        ({"max_workers": True}, "max_workers"),
    ],
)
def test_limits_are_checked(limits, named):
    with pytest.raises(offload.BindingError, match=f"{named}: expected an integer of at least 1"):
        offload.tasks(**limits)


def test_what_cannot_be_called(run):
    async def coroutine() -> None: ...

    with offload.tasks() as t:
        with pytest.raises(offload.BindingError, match="coroutine function"):
            t.submit(coroutine)
        with pytest.raises(offload.BindingError, match="got a Tensor"):
            t.submit(torch.zeros(4))
        with pytest.raises(offload.BindingError, match="expected tickets, got a Tensor"):
            t.after(torch.zeros(4))
        with pytest.raises(offload.BindingError, match="expected float32"):
            t.submit(run, torch.zeros(5))
    with pytest.raises(offload.ExecutionError, match="the block has ended"):
        t.submit(run, torch.zeros(4))


def test_no_thread_and_no_tensor_is_left(run):
    before = threading.active_count()
    x = torch.zeros(4)
    alive = weakref.ref(x)
    with pytest.raises(Refused), offload.tasks() as t:  # noqa: PT012
        a = t.submit(torch.clone, x)
        t.submit(refuse, t.submit(run, a))
        t.submit(run, t.submit(run, x))
    del a, t, x
    gc.collect()
    assert alive() is None
    assert threading.active_count() <= before


def test_many_tasks_leave_nothing(run):
    """Ended tickets are forgotten while the block continues."""
    with offload.tasks(buffersize=8) as t:
        for _ in range(2000):
            t.submit(run, t.submit(torch.zeros, 4))
            assert len(t._in_flight) <= 8
    assert run.last_execution.n_executions == 2000


@pytest.mark.parametrize("limits", [{"buffersize": 3}, {"buffer_bytes": 48}])
def test_several_threads_submit_within_the_limits(limits):
    """Each submission holds 16 bytes; a callable notes how many are in flight when it begins."""
    x, lock = torch.zeros(4), threading.Lock()
    under_way, most = 0, 0

    def note(_: object) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        threading.Event().wait(0.001)
        with lock:
            under_way -= 1

    with offload.tasks(max_workers=16, **limits) as t:

        def submit() -> None:
            for _ in range(20):
                t.submit(note, x)

        threads = [threading.Thread(target=submit) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(WAITING_SECONDS)
        assert not any(one.is_alive() for one in threads)
    assert 1 <= most <= 3


def test_a_thread_that_waits_for_room_enters_before_the_block_ends_or_is_refused():
    """No submission is lost between the last one's end and that of the block."""
    for _ in range(50):
        outcomes: list[object] = []

        def submit(t: offload.Tasks, outcomes: list[object]) -> None:
            for _ in range(3):
                try:
                    outcomes.append(t.submit(lambda: None))
                except offload.ExecutionError as error:
                    outcomes.append(error)

        with offload.tasks(buffersize=1) as t:
            threads = [threading.Thread(target=submit, args=(t, outcomes)) for _ in range(3)]
            for one in threads:
                one.start()
        for one in threads:
            one.join(WAITING_SECONDS)
        assert len(outcomes) == 9
        for one in outcomes:
            if isinstance(one, Ticket):
                assert one.done()
                assert one.result() is None
            else:
                assert "the block has ended" in str(one)
