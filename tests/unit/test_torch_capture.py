"""What of capturing with torch needs no GPU: requests told apart, last uses, refusals."""

from __future__ import annotations

import pytest
import torch

import offload
from offload.backends.cuda.capture import Allocation
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.backends.cuda.torch_pool import PoolMemory
from offload.backends.cuda.torch_warm_up import _last_uses, first_line


class FakePool:
    """Allocations that were asked of the discovery pool."""

    def __init__(self, *addresses: int) -> None:
        self._events = [("allocate", address, 2 << 20) for address in addresses]

    def events(self):
        return [*self._events, ("free", 1, 2 << 20)]


@pytest.fixture
def memory(monkeypatch):
    """A PoolMemory over given addresses, and torch's record of requests."""

    def make(addresses, requests, idle=(), fillers=None):
        entries = [{"action": "alloc", "addr": at, "size": size} for at, size in requests]
        entries.insert(1, {"action": "free_completed", "addr": requests[0][0], "size": 1})
        record = {"device_traces": [entries]}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: record)
        found = PoolMemory.__new__(PoolMemory)
        found._pool, found._device = FakePool(*addresses), 0
        found._idle, found._fillers = set(idle), fillers or {}
        return found

    return make


def test_values_have_their_own_size_and_scratch_the_largest_request(memory):
    found = memory([10, 20], [(10, 100), (20, 40), (20, 60), (20, 50)])
    allocations, recycled = found.allocations({10: 3}, {3: 96})
    assert allocations == [Allocation(10, 96, 3), Allocation(20, 60, None)]
    assert recycled == set()


def test_fillers_are_neither_requests_nor_allocations(memory):
    requests = [(10, 100), (20, 40), (20, 1 << 20), (30, 1 << 20)]
    found = memory([10, 20, 30], requests, idle=[30], fillers={20: 1})
    allocations, recycled = found.allocations({10: 0}, {0: 100})
    assert allocations == [Allocation(10, 100, 0), Allocation(20, 40, None)]
    assert recycled == set()


def test_a_value_on_memory_that_was_something_else_is_told(memory):
    found = memory([10], [(10, 4096), (10, 16)])
    allocations, recycled = found.allocations({10: 5}, {5: 16})
    assert allocations == [Allocation(10, 16, 5)]
    assert recycled == {5}


def test_memory_without_a_recorded_request_is_refused(memory):
    found = memory([10, 20], [(10, 16)])
    with pytest.raises(offload.ExecutionError, match=r"no record of the request .* 0x14"):
        found.allocations({10: 0}, {0: 16})


def test_last_uses_name_each_activation_once():
    def run(x):
        first = x + 1
        second = first * 2
        return first + second

    with offload.capture(run) as captured:
        captured(torch.ones(3))
    dead = _last_uses(captured.program)
    (first,), (second,), _ = (
        tuple(view.value for view in launch.made()) for launch in captured.program.launches
    )
    assert {launch: sorted(values) for launch, values in dead.items()} == {2: [first, second]}


def test_a_caller_who_captures_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with offload.capture(torch.sin) as captured:
        captured(torch.ones(3))
    with pytest.raises(offload.CaptureError, match="being captured on the current stream"):
        TorchCapturer().capture(captured.program, None)


def test_first_line_of_an_error():
    assert first_line(RuntimeError("\n  out of order \nadvice")) == "out of order"
    assert first_line(RuntimeError()) == "RuntimeError"
