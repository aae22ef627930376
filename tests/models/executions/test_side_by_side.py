"""The promises of the page on threads about one captured program: its methods in many threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import offload

N_THREADS = 6
INPUTS = [torch.full((2, 8), float(number)) for number in range(30)]


class Shared:
    """A captured program, its executable, and the model's result for each of INPUTS."""

    def __init__(self, folder: Path) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        self.captured = offload.capture(model, INPUTS[0])
        self.run = self.captured.load()
        self.folder = folder
        with torch.no_grad():
            self.expected = [model(one) for one in INPUTS]

    def call(self, number: int) -> None:
        assert torch.equal(self.run(INPUTS[number]), self.expected[number])

    def call_captured(self, number: int) -> None:
        assert torch.equal(self.captured(INPUTS[number]), self.expected[number])

    def submit(self, number: int) -> None:
        assert torch.equal(self.run.submit(INPUTS[number]).result(), self.expected[number])

    def load(self, number: int) -> None:
        with self.captured.load() as run:
            assert torch.equal(run(INPUTS[number]), self.expected[number])

    def save_and_open(self, number: int) -> None:
        path = self.folder / f"{number}.offload"
        self.captured.save(path)
        assert torch.equal(offload.open(path)(INPUTS[number]), self.expected[number])

    def rebind(self, number: int) -> None:
        self.run.rebind_weights()
        self.call(number)

    def timeline(self, number: int) -> None:
        with self.captured.load() as run, run.timeline() as timeline:
            run(INPUTS[number])
        assert len(timeline.executions) == 1


METHODS = [
    Shared.call,
    Shared.call_captured,
    Shared.submit,
    Shared.load,
    Shared.save_and_open,
    Shared.rebind,
    Shared.timeline,
]


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def in_threads(call: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(call, range(len(INPUTS))))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_one_method_in_many_threads(shared, method):
    in_threads(lambda number: method(shared, number))


def test_all_methods_in_many_threads(shared):
    in_threads(lambda number: METHODS[number % len(METHODS)](shared, number))
    on_it = [METHODS[number % len(METHODS)] for number in range(len(INPUTS))]
    n_expected = sum(one in (Shared.call, Shared.submit, Shared.rebind) for one in on_it)
    assert shared.run.last_execution.n_executions == n_expected


def test_executables_of_one_program_run_beside_each_other(shared):
    """One for each worker thread: calls do not wait for each other; weights are in memory once."""
    own = threading.local()

    def call(number: int) -> None:
        if not hasattr(own, "run"):
            own.run = shared.captured.load()
        assert torch.equal(own.run(INPUTS[number]), shared.expected[number])

    in_threads(call)
    assert shared.run.last_execution.n_executions == 0


def test_close_beside_calls(shared):
    """Each call gives its result, or an error that the executable is closed."""
    refused = []
    closing = threading.Event()

    def call(number: int) -> None:
        if number == 15:
            shared.run.close()
            closing.set()
        try:
            shared.call(number)
        except offload.ExecutionError as error:
            refused.append(str(error))
        if number > 20:
            closing.wait(60)

    in_threads(call)
    assert refused
    assert all("closed" in one for one in refused)


def test_an_event_loop_calls_in_its_executor(shared):
    async def serve() -> list[torch.Tensor]:
        loop = asyncio.get_running_loop()
        calls = (loop.run_in_executor(None, shared.run, one) for one in INPUTS)
        tickets = [shared.run.submit(one) for one in INPUTS]
        waits = (loop.run_in_executor(None, ticket.result) for ticket in tickets)
        return [*await asyncio.gather(*calls), *await asyncio.gather(*waits)]

    for got, expected in zip(asyncio.run(serve()), 2 * shared.expected, strict=True):
        assert torch.equal(got, expected)


def test_the_second_timeline_of_one_executable_is_refused(shared):
    with (
        shared.run.timeline(),
        pytest.raises(offload.ExecutionError, match="recorded already"),
        shared.run.timeline(),
    ):
        pass
