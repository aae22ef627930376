"""What of capturing with torch needs no GPU: requests told apart, last uses, refusals."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
import types

import pytest
import torch

import offload
from offload.backends.cuda import torch_capture, torch_pool
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.backends.cuda.torch_pool import PoolMemory
from offload.backends.random_draws import own_random_states
from offload.backends.relocation.captures import Allocation
from offload.backends.torch_warm_up import first_line, last_uses_of


class FakePool:
    """Allocations that were asked of the discovery pool."""

    def __init__(self, *addresses: int) -> None:
        self._events = [("allocate", address, 2 << 20) for address in addresses]

    def events(self, begin=0):
        return [*self._events, ("free", 1, 2 << 20)][begin:]


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


def test_settling_asks_for_the_events_of_one_launch(memory, monkeypatch):
    """A capture of n launches must not read what all of them have allocated at each."""
    found = memory([10, 20], [(10, 16)])
    seen: list[tuple[str, int, int]] = []
    asked: list[int] = []

    class Pool:
        @property
        def n_events(self) -> int:
            return len(seen)

        def events(self, begin=0):
            asked.append(len(seen[begin:]))
            return seen[begin:]

    filled: list[int] = []
    found._pool, found._n_seen = Pool(), 0
    monkeypatch.setattr(found, "_fill", filled.append)
    for launch in range(50):
        seen += [("allocate", 100 * launch, 512), ("allocate", 100 * launch + 1, 1024),
                 ("free", 100 * launch, 512)]  # fmt: skip
        found.settle(held={100 * launch + 1})
    assert asked == [3] * 50
    assert filled == [512] * 50


def test_last_uses_name_each_activation_once():
    def run(x):
        first = x + 1
        second = first * 2
        return first + second

    with offload.capture(run) as captured:
        captured(torch.ones(3))
    dead = last_uses_of(captured.program)
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


@pytest.mark.parametrize("failing", ["all", None, "inside"])
def test_the_pool_serves_nobody_afterwards_whatever_fails(monkeypatch, failing):
    """Torch's history is switched on and off by calls that may fail, as what runs between may."""
    current: list[object] = []
    recorded: list[str | None] = []

    def record(enabled: str | None, **_: object) -> None:
        recorded.append(enabled)
        if enabled == failing:
            raise RuntimeError("history")

    pool = types.SimpleNamespace(set_current=current.append)
    monkeypatch.setattr(torch_pool, "_native", types.SimpleNamespace(DiscoveryPool=pool))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    memory = PoolMemory.__new__(PoolMemory)
    memory._pool = "pool"
    with pytest.raises(RuntimeError), memory.current():
        raise RuntimeError("inside")
    assert current == ["pool", None]
    assert recorded == (["all"] if failing == "all" else ["all", None])


@pytest.mark.parametrize("ends", ["well", "failed", "never begun"])
def test_a_graph_whose_capture_does_not_end_is_kept(monkeypatch, ends):
    """Torch leaves its filters for the graph's memory where they are, and one has its address."""
    asked: list[tuple[str, int, object]] = []

    class Graph:
        def capture_end(self) -> None:
            if ends != "well":
                raise RuntimeError("operation failed due to a previous error during capture")

    def end(device: int, pool: object) -> None:
        asked.append(("end", device, pool))
        if ends == "never begun":
            raise RuntimeError("not currently recording to mempool_id")

    def release(device: int, pool: object) -> None:
        asked.append(("release", device, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(torch_capture, "_never_ended", [])
    one = torch_capture._OneCapture.__new__(torch_capture._OneCapture)
    one._graph, one._device = Graph(), 3
    one._memory = types.SimpleNamespace(torch_pool=types.SimpleNamespace(id=(0, 7)))
    one._abandon()
    assert torch_capture._never_ended == ([] if ends == "well" else [one._graph])
    expected = [("end", 3, (0, 7)), ("release", 3, (0, 7))]
    assert asked == {"well": [], "failed": expected, "never begun": expected[:1]}[ends]


@contextlib.contextmanager
def nothing(*_: object):
    yield


class FakeStream:
    device_index = 0

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> None:
        pass


def test_captures_on_several_threads_take_turns(monkeypatch):
    """The pool that serves torch, its record of requests and its generators are the process's."""
    n_inside, most = 0, 0

    @contextlib.contextmanager
    def states(*_: object):
        nonlocal n_inside, most
        n_inside += 1
        most = max(most, n_inside)
        time.sleep(0.02)
        yield
        n_inside -= 1

    for name, fake in {
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda _: FakeStream(),
        "Stream": lambda _: FakeStream(),
        "device": nothing,
        "stream": nothing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch_capture, "generators_of", lambda *_: [])
    monkeypatch.setattr(torch_capture, "own_random_states", states)
    monkeypatch.setattr(torch_capture, "device_of", lambda _: 0)
    monkeypatch.setattr(torch_capture, "_warm_up_drawing", lambda *_: None)
    monkeypatch.setattr(TorchCapturer, "_until_unshared", lambda *_: "captured")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: TorchCapturer().capture(None, None), range(4)))
    assert found == ["captured"] * 4
    assert most == 1


class FakeGenerator:
    """A generator whose state is an object; those that cannot be set fail half-way."""

    def __init__(self, state: object, fails: bool = False) -> None:
        self._cdata = id(self)
        self.state, self._fails = state, fails

    def graphsafe_get_state(self) -> object:
        return self.state

    def get_state(self) -> object:
        if self._fails:
            raise RuntimeError("out of memory")
        return self.state

    def graphsafe_set_state(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("second_fails", [False, True])
def test_generators_get_their_states_back(monkeypatch, second_fails):
    class Own:
        def __init__(self, device: object) -> None:
            pass

        def set_state(self, state: object) -> None:
            pass

    generators = [FakeGenerator("first"), FakeGenerator("second", second_fails)]
    monkeypatch.setattr(torch, "Generator", Own)
    expected = pytest.raises(RuntimeError, match="memory") if second_fails else nothing()
    with expected, own_random_states(generators, torch.device("cuda", 0)):
        assert all(isinstance(one.state, Own) for one in generators)
    assert [one.state for one in generators] == ["first", "second"]


def test_first_line_of_an_error():
    assert first_line(RuntimeError("\n  out of order \nadvice")) == "out of order"
    assert first_line(RuntimeError()) == "RuntimeError"
