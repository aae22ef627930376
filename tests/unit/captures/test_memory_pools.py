"""Pools are destroyed where torch's allocator allows it: never during a capture or allocation."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading

import pytest
import torch
from torch_captures import one_capture
from torch_pools import take_for_devices

import offload
from offload.interpreter import memory_pools
from offload.interpreter.memory_pools import MemoryPool, region
from offload.record import watched_call as recording
from offload.record.launches import LaunchRecorder
from offload.record.recording_device import Allocations

GPU = torch.device("cuda", 0)


@pytest.fixture
def allocator(monkeypatch):
    yield take_for_devices(monkeypatch)
    assert memory_pools._regions == []
    assert memory_pools._ending == []


def test_a_closed_pool_goes_at_once(allocator):
    pool = MemoryPool(GPU)
    pool.close()
    assert allocator.ended == [0]
    pool.close()
    del pool
    assert allocator.ended == [0]


def test_a_dropped_pool_goes_at_once(allocator):
    pool = MemoryPool(GPU)
    with pool.use():
        pass
    del pool
    assert allocator.ended == [0]


def test_a_pool_that_is_dropped_in_another_ones_region_goes_after_it(allocator):
    late, used = MemoryPool(GPU), MemoryPool(GPU)
    with used.use():
        with region():
            del late
        assert allocator.ended == []
    assert allocator.ended == [0]
    used.close()
    assert allocator.ended == [0, 0]


def test_the_collector_ends_no_pool_inside_a_region(allocator):
    class Holder:
        def __init__(self) -> None:
            self.pool, self.itself = MemoryPool(GPU), self

    gc.collect()
    Holder()
    assert allocator.ended == []
    with region():
        gc.collect()
        assert allocator.ended == []
    assert allocator.ended == [0]


def test_regions_of_other_threads_count(allocator):
    begun, end = threading.Event(), threading.Event()

    def use() -> None:
        with region():
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=use)
    thread.start()
    begun.wait(10)
    MemoryPool(GPU).close()
    assert allocator.ended == []
    end.set()
    thread.join()
    assert allocator.ended == [0]


def test_a_capture_of_the_callers_own_on_this_stream_is_waited_for(allocator):
    allocator.capturing = {GPU}
    MemoryPool(GPU).close()
    assert allocator.ended == []
    allocator.capturing.clear()
    with region():
        assert allocator.ended == [0]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("captures", [0, 1])
@pytest.mark.parametrize("of", [0, 1])
def test_a_pool_asks_the_stream_of_its_own_device(allocator, current, captures, of):
    """Whichever device is torch's current one; that stays unchanged."""
    first, second = (torch.device("cuda", index) for index in (0, 1))
    devices = first, second
    allocator.current, allocator.capturing = devices[current], {devices[captures]}
    MemoryPool(devices[of]).close()
    assert allocator.ended == ([] if captures == of else [0])
    assert allocator.current == devices[current]
    allocator.capturing.clear()
    with region():
        assert allocator.ended == [0]


def test_a_pool_that_has_to_stay_keeps_none_of_another_device(allocator):
    other = torch.device("cuda", 1)
    allocator.capturing = {other}
    waiting = MemoryPool(other)
    waiting.close()
    assert allocator.ended == []
    MemoryPool(GPU).close()
    assert allocator.ended == [0]
    allocator.capturing = {GPU}
    MemoryPool(GPU).close()
    with region():  # and vice versa, in any order of the queue
        assert allocator.ended == [0, 0]
    allocator.capturing.clear()
    with region():
        assert allocator.ended == [0, 0, 0]


def test_a_pool_on_a_device_that_has_failed_stays(allocator):
    """Its memory cannot be freed, and a destructor can only report that by ending the process."""
    allocator.fault = "an illegal memory access was encountered"
    MemoryPool(GPU).close()
    with region():
        pass
    assert allocator.ended == []
    allocator.fault = None  # as if a single query failed
    with region():
        assert allocator.ended == [0]


def test_pools_stay_when_the_interpreter_ends(allocator, monkeypatch):
    """On a device that has failed, their destructor would end the process by a signal."""
    pool, dropped = MemoryPool(GPU), MemoryPool(GPU)
    allocator.fault = "an illegal memory access was encountered"
    dropped.close()
    assert len(memory_pools._ending) == 1
    memory_pools._keep_all()
    memory_pools._ending.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        del pool
    gc.collect()
    assert allocator.ended == []


def test_a_pool_that_was_never_made_is_no_error(allocator, monkeypatch):
    def fail() -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(allocator.module, "MemPool", fail)
    with pytest.raises(RuntimeError, match="no device"):
        MemoryPool(GPU)


def test_neither_a_fork_nor_its_child_waits_for_a_thread(allocator):
    """The thread may itself wait for a lock that another library holds across the fork."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with memory_pools._lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    child = os.fork()
    if child == 0:
        MemoryPool(GPU).close()
        os._exit(0 if allocator.ended == [0] else 1)
    release.set()
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def test_pools_of_the_parent_stay_in_the_child_of_a_fork(allocator):
    """There torch says that the device is not initialised."""
    dropped, held = MemoryPool(GPU), MemoryPool(GPU)
    allocator.fault = "busy"
    dropped.close()
    child = os.fork()
    if child == 0:
        allocator.fault, allocator.is_initialized = None, False
        with region():
            held.close()
        del dropped, held
        gc.collect()
        os._exit(0 if allocator.ended == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    allocator.fault = None
    with region():
        pass
    assert allocator.ended == [0]


def test_the_collector_initialises_no_device(allocator, monkeypatch):
    """It may run where this thread holds torch's lock of the initialisation."""

    def initialise(_: torch.device) -> None:
        raise AssertionError("torch would wait for its lock")

    monkeypatch.setattr(allocator.module, "device", initialise)
    allocator.is_initialized = False
    MemoryPool(GPU)
    assert allocator.ended == [0]


# ---- recordings --------------------------------------------------------------------------------


class OnDevice(Allocations):
    """The allocations of a recording whose tensors are on the CPU, as of one on a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(GPU)


def reads(x: torch.Tensor) -> torch.Tensor:
    return x + x.sum().item()


def swallows(x: torch.Tensor) -> torch.Tensor:
    try:
        return reads(x)
    except offload.CaptureError:
        return x


def fails(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no")


def computes(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("function", [computes, reads, swallows, fails])
def test_a_recording_lets_its_pool_go_at_its_end(allocator, monkeypatch, function):
    """Also while its error is still referenced, and with it all frames of the recording."""
    monkeypatch.setattr(recording, "Allocations", OnDevice)
    error = None
    try:
        offload.capture(function, torch.ones(3))
    except (offload.CaptureError, ValueError) as raised:
        error = raised
    assert (error is None) == (function is computes)
    assert allocator.n_made == len(allocator.ended) > 0
    assert not any(allocator.ended)


def test_a_recording_that_cannot_begin_lets_its_pool_go(allocator, monkeypatch):
    def refuse(mode: object) -> None:
        raise RuntimeError("no modes")

    monkeypatch.setattr(recording, "Allocations", OnDevice)
    monkeypatch.setattr(recording, "dispatch_mode", refuse)
    with pytest.raises(RuntimeError, match="no modes"):
        offload.capture(computes, torch.ones(3))
    assert allocator.ended == [0]


def capture_in_block(function: object) -> None:
    with offload.capture(function) as captured:
        captured(torch.ones(3))


@pytest.mark.parametrize("function", [reads, swallows, fails])
@pytest.mark.parametrize(
    "capture", [lambda one: offload.capture(one, torch.ones(3)), capture_in_block]
)
def test_a_refused_recording_is_no_cycle(monkeypatch, function, capture):
    """It holds the model's tensors; only the error holds it, for as long as the error lives."""
    alive: list[int] = []

    class Counted(LaunchRecorder):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    monkeypatch.setattr(recording, "LaunchRecorder", Counted)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((offload.CaptureError, ValueError)):
            capture(function)
        assert alive == []
    finally:
        gc.enable()


def swallow_in_block() -> None:
    with offload.capture(reads) as captured, contextlib.suppress(offload.CaptureError):
        captured(torch.ones(3))


def test_a_refusal_that_a_block_swallows_is_raised_at_its_end():
    with pytest.raises(offload.CaptureError, match=r"test_memory_pools.py:\d+.*reads a tensor's"):
        swallow_in_block()


# ---- captures ----------------------------------------------------------------------------------


def test_no_pool_goes_while_a_graph_is_captured(allocator, monkeypatch):
    def asked() -> bool:
        MemoryPool(GPU).close()
        assert allocator.ended == []
        raise RuntimeError("enough")

    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", asked, raising=False)
    with pytest.raises(RuntimeError, match="enough"):
        one_capture(monkeypatch, takes_devices=False).run()
    assert allocator.ended == [0, 0, 0]  # those of the capture as well
