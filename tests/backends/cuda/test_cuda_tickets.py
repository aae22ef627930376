"""Submitted executions on the simulated device: enqueued while others are in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from graphs import Cuda
from residents import COUNT, Chain, make_replay_of

from offload.errors import ExecutionError
from offload.native import _native

LAUNCHED = "cuGraphLaunch"


class Gate:
    """A gate that work on the device waits for, for half a minute at most."""

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self.seen: list[bool] = []

    def __call__(self) -> None:
        until = time.monotonic() + 30
        while not self._is_open() and time.monotonic() < until:
            time.sleep(0.001)
        self.seen.append(self._is_open())


@pytest.fixture
def streams(cuda: Cuda) -> list[int]:
    """The caller's current stream is the last of them."""
    return [cuda.stream()]


@pytest.fixture
def chain(cuda: Cuda) -> Chain:
    return Chain(cuda, _native.CudaArena(0))


@pytest.fixture
def replay(chain: Chain, streams: list[int]) -> Iterator[_native.Replay]:
    """y = x + 3, on three kernels."""
    replay = make_replay_of(chain, lambda _: streams[-1])
    yield replay
    replay.close()


def numbers(first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + COUNT)


def submit(replay: _native.Replay, x: torch.Tensor) -> _native.Ticket:
    return replay.submit(x)


def hold(cuda: Cuda, stream: int, gate: Gate) -> None:
    """Let the stream wait for the gate."""
    cuda.launch(cuda.simulator.kernel("gate", [], lambda _: gate()), stream, [], [])


def test_the_next_execution_is_enqueued_before_the_one_before_it_has_ended(cuda, replay, streams):
    simulator = cuda.simulator
    gate = Gate(lambda: simulator.calls(LAUNCHED) == 3)
    hold(cuda, streams[-1], gate)
    tickets = [submit(replay, numbers(10 * index)) for index in range(3)]
    assert [ticket.result().tolist() for ticket in tickets] == [
        (numbers(10 * index) + 3).tolist() for index in range(3)
    ]
    assert gate.seen == [True]  # the first had not begun when the third was enqueued


def test_a_call_is_enqueued_while_submitted_work_is_under_way(cuda, replay, streams):
    simulator = cuda.simulator
    gate = Gate(lambda: simulator.calls(LAUNCHED) == 2)
    hold(cuda, streams[-1], gate)
    x = numbers(5)
    ticket = submit(replay, x)
    y = replay(x)
    assert ticket.result().tolist() == (x + 3).tolist()
    cuda.synchronize(streams[-1])
    assert y.tolist() == (x + 3).tolist()
    assert gate.seen == [True]


def test_a_ticket_is_done_when_its_own_execution_is(cuda, replay, streams):
    """Not when a later execution is, which waits for a gate that the test opens."""
    first = submit(replay, numbers())
    first.wait()
    opened = threading.Event()
    hold(cuda, streams[-1], Gate(opened.is_set))
    second, third = submit(replay, numbers(1)), submit(replay, numbers(2))
    assert first.done()
    assert not second.done()
    opened.set()
    third.wait()
    assert second.done()  # in order
    assert second.result().tolist() == (numbers(1) + 3).tolist()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failed_launch_lands_on_its_own_ticket(cuda, replay, streams, nth):
    submit(replay, numbers()).wait()  # instantiates
    simulator = cuda.simulator
    n_before = simulator.calls(LAUNCHED)
    gate = Gate(lambda: simulator.calls(LAUNCHED) == n_before + 3)
    hold(cuda, streams[-1], gate)
    simulator.fail(LAUNCHED, 999, nth=nth)
    tickets = [submit(replay, numbers(10 * index)) for index in range(3)]
    for index, ticket in enumerate(tickets):
        if index + 1 == nth:
            with pytest.raises(ExecutionError, match="launching the graph: CUDA_ERROR_UNKNOWN"):
                ticket.wait()
        else:
            assert ticket.result().tolist() == (numbers(10 * index) + 3).tolist()
    assert gate.seen == [True]
    assert submit(replay, numbers(7)).result().tolist() == (numbers(7) + 3).tolist()


def test_a_failure_is_told_when_nothing_is_under_way_any_more(cuda, replay, streams):
    submit(replay, numbers()).wait()
    opened = threading.Event()
    hold(cuda, streams[-1], Gate(opened.is_set))
    cuda.simulator.fail(LAUNCHED, 999)
    ticket = submit(replay, numbers(1))
    time.sleep(0.02)
    assert not ticket.done()
    opened.set()
    with pytest.raises(ExecutionError, match="launching the graph"):
        ticket.wait()


def test_a_device_fault_ends_every_ticket(cuda, replay, streams):
    submit(replay, numbers()).wait()
    opened = threading.Event()
    gate = Gate(opened.is_set)

    def fail(_: bytes) -> None:
        gate()
        raise ValueError("out of bounds")

    cuda.launch(cuda.simulator.kernel("failing", [], fail), streams[-1], [], [])
    tickets = [submit(replay, numbers(index)) for index in range(3)]
    opened.set()
    for ticket in tickets:
        with pytest.raises(ExecutionError, match="CUDA_ERROR_LAUNCH_FAILED"):
            ticket.wait()
    cuda.simulator.errors.clear()


def test_an_end_that_cannot_be_marked_is_that_tickets_error(cuda, replay):
    submit(replay, numbers()).wait()
    cuda.simulator.fail("cuEventCreate", 999)
    with pytest.raises(ExecutionError, match="making an event"):
        submit(replay, numbers(1)).wait()
    assert submit(replay, numbers(2)).result().tolist() == (numbers(2) + 3).tolist()


def test_closing_waits_for_all_that_is_under_way(cuda, replay, streams):
    simulator = cuda.simulator
    gate = Gate(lambda: simulator.calls(LAUNCHED) == 4)
    hold(cuda, streams[-1], gate)
    tickets = [submit(replay, numbers(index)) for index in range(4)]
    replay.close()
    assert all(ticket.done() for ticket in tickets)
    assert [ticket.result()[0].item() for ticket in tickets] == [3, 4, 5, 6]
    assert simulator.live("executable") == 0
    with pytest.raises(ExecutionError, match="closed"):
        submit(replay, numbers())


def test_tickets_leave_no_events(cuda, replay):
    submit(replay, numbers()).wait()
    before = cuda.simulator.live("event")
    for index in range(20):
        submit(replay, numbers(index)).wait()
    assert cuda.simulator.live("event") == before
