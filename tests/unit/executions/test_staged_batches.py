"""Batches through three queues on a virtual clock: how much copies and executions overlap."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

import offload
from offload.run.ordered_results import ordered_results
from offload.run.staged_batches import StagedBatches


class Clock:
    """The host's time in ns. The host's own work takes none."""

    now_ns = 0


@dataclasses.dataclass
class Event:
    clock: Clock
    at_ns: int

    def query(self) -> bool:
        return self.clock.now_ns >= self.at_ns

    def synchronize(self) -> None:
        self.clock.now_ns = max(self.clock.now_ns, self.at_ns)


class Queue(contextlib.AbstractContextManager):
    """Executes in order, each item no earlier than it was enqueued."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_ns, self.busy_ns = clock, 0, 0

    def __exit__(self, *_: object) -> None: ...

    def work(self, time_ns: int) -> None:
        self.free_ns = max(self.free_ns, self.clock.now_ns) + time_ns
        self.busy_ns += time_ns

    def wait_stream(self, other: Queue) -> None:
        self.free_ns = max(self.free_ns, other.free_ns)

    def record_event(self) -> Event:
        return Event(self.clock, self.free_ns)


class Device:
    """A simulated device: memory in flight is counted, and each stage takes a time."""

    def __init__(self, upload_ns: int, execution_ns: int, download_ns: int) -> None:
        self.clock = Clock()
        self.uploads, self.executions, self.downloads = (Queue(self.clock) for _ in range(3))
        self.times_ns = (upload_ns, execution_ns, download_ns)

    def upload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.uploads.work(self.times_ns[0])
        return tensor, tensor.clone()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.executions.work(self.times_ns[1])
        return x + 1

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        self.downloads.work(self.times_ns[2])
        return tensor.clone()

    def map(self, n_batches: int, buffersize: int) -> Iterator[torch.Tensor]:
        staged = StagedBatches(
            self.run, self, lambda args, kwargs: lambda one: isinstance(one, torch.Tensor)
        )
        return ordered_results(
            staged.begin,
            (torch.tensor([float(number)]) for number in range(n_batches)),
            buffersize=buffersize,
            buffer_bytes=None,
            bytes_of=lambda args, kwargs: 0,
        )


TIMES_NS = {
    "alike": (100, 100, 100),
    "upload": (300, 100, 50),
    "execution": (80, 200, 40),
    "download": (30, 50, 170),
    "two alike": (100, 100, 10),
}


@pytest.mark.parametrize("name", TIMES_NS)
@pytest.mark.parametrize("n_batches", [8, 64])
def test_the_longest_stage_sets_the_pace(name: str, n_batches: int) -> None:
    """Within 3 % of the bound: the longest stage for each batch, and the others once."""
    device = Device(*TIMES_NS[name])
    ended_ns = []
    for number, result in enumerate(device.map(n_batches, buffersize=3)):
        assert result.item() == number + 1
        ended_ns.append(device.clock.now_ns)
    longest_ns = max(device.times_ns)
    bound_ns = sum(device.times_ns) + (n_batches - 1) * longest_ns
    assert bound_ns <= device.clock.now_ns <= 1.03 * bound_ns
    periods_ns = [later - earlier for earlier, later in itertools.pairwise(ended_ns)]
    assert all(period_ns <= 1.03 * longest_ns for period_ns in periods_ns)


def test_one_in_flight_is_a_sequence() -> None:
    device = Device(100, 100, 100)
    assert len(list(device.map(10, buffersize=1))) == 10
    assert device.clock.now_ns == 10 * 300


def test_every_stage_is_done_once_and_memory_is_bounded() -> None:
    device = Device(30, 50, 20)
    held: list[object] = []
    begin = StagedBatches(
        device.run, device, lambda args, kwargs: lambda one: isinstance(one, torch.Tensor)
    ).begin

    def begun(args: tuple, kwargs: dict) -> object:
        held.append(begin(args, kwargs))
        assert sum(bool(one.kept) for one in held) <= 3
        return held[-1]

    results = ordered_results(
        begun,
        [{"x": torch.ones(1)}, (torch.ones(1),), torch.ones(1), torch.ones(1), torch.ones(1)],
        buffersize=3,
        buffer_bytes=None,
        bytes_of=lambda args, kwargs: 0,
    )
    assert [one.item() for one in results] == [2.0] * 5
    assert [one.busy_ns for one in (device.uploads, device.executions, device.downloads)] == [
        5 * 30,
        5 * 50,
        5 * 20,
    ]
    assert not any(one.kept for one in held)


def test_what_lies_on_the_device_stays_there() -> None:
    device = Device(30, 50, 20)
    begin = StagedBatches(device.run, device, lambda args, kwargs: lambda one: False).begin
    batch = begin((torch.zeros(1),), {})
    assert batch.result().item() == 1.0
    assert device.clock.now_ns == 50


def test_leaving_early_waits_for_what_the_device_was_given() -> None:
    device = Device(30, 50, 20)
    results = device.map(10, buffersize=3)
    next(results)
    results.close()
    assert device.clock.now_ns == device.downloads.free_ns
    assert device.uploads.busy_ns <= 5 * 30


def test_a_failing_device_is_an_execution_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(30, 50, 20)

    def fail(self: Event) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    results = device.map(10, buffersize=3)
    monkeypatch.setattr(Event, "synchronize", fail)
    with pytest.raises(offload.ExecutionError, match="illegal memory access"):
        next(results)


def test_a_batch_that_fails_half_way_waits_for_what_was_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copies go back to the allocator, which would give them to the next batch."""
    device = Device(3, 5, 7)

    def no_memory(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a result")

    monkeypatch.setattr(device, "download", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for a result"):
        list(device.map(2, buffersize=2))
    assert device.executions.busy_ns == 5
    assert device.clock.now_ns >= device.executions.free_ns
