"""Memory of a capture with torch: what is an allocation, a filler, a stand-in; and its record."""

from __future__ import annotations

import types

import pytest
import torch
from torch_captures import FakePool, fillers_at, pool_memory, recorded_requests

import offload
from offload.backends.captured.relocation.captures import Allocation
from offload.backends.cuda import torch_pool


@pytest.fixture
def memory(monkeypatch):
    """Memory at these addresses, for which torch has recorded these requests."""

    def make(addresses, requests):
        found = pool_memory(monkeypatch, FakePool(*addresses))
        recorded_requests(monkeypatch, requests)
        return found

    return make


def test_values_have_their_own_size_and_scratch_the_largest_request(memory):
    found = memory([10, 20], [(10, 100), (20, 40), (20, 60), (20, 50)])
    allocations, recycled = found.allocations({10: 3}, {3: 96})
    assert allocations == [Allocation(10, 96, 3), Allocation(20, 60, None)]
    assert recycled == set()


def test_fillers_are_neither_requests_nor_allocations(monkeypatch):
    """One takes the memory that a launch freed; another gets a block of its own."""
    pool = FakePool(10, 20, 25)
    found = pool_memory(monkeypatch, pool)
    requests = [(10, 100), (20, 40), (25, 16), (20, 1 << 20), (30, 1 << 20)]
    recorded_requests(monkeypatch, requests)
    fillers_at(monkeypatch, 20, 30, pool=pool)
    found.settle(held={10})
    allocations, recycled = found.allocations({10: 0}, {0: 100})
    assert allocations == [
        Allocation(10, 100, 0),
        Allocation(20, 40, None),
        Allocation(25, 16, None),
    ]
    assert recycled == set()


@pytest.mark.parametrize(
    ("earlier", "recycled"), [([4096], {5}), ([16], set()), ([8, 16, 4], set())]
)
def test_a_value_on_memory_that_was_something_larger_is_told(memory, earlier, recycled):
    found = memory([10], [(10, one) for one in (*earlier, 16)])
    assert found.allocations({10: 5}, {5: 16}) == ([Allocation(10, 16, 5)], recycled)


def test_memory_without_a_recorded_request_is_refused(memory):
    found = memory([10, 20], [(10, 16)])
    with pytest.raises(offload.ExecutionError, match=r"no record of the request .* 0x14"):
        found.allocations({10: 0}, {0: 16})


def test_stand_ins_are_no_memory_of_torchs(monkeypatch):
    """A user's limit on the process's memory does not count them: they are only addresses."""
    pool = FakePool(10)
    found = pool_memory(monkeypatch, pool)
    recorded_requests(monkeypatch, [(10, 16)])
    taken = fillers_at(monkeypatch, pool=pool)
    stand_ins = [found.stand_in(size_bytes) for size_bytes in (1 << 40, 96)]
    found.settle(held=())  # nothing was allocated since
    assert taken == []
    addresses = [one.data_ptr() for one in stand_ins]
    assert [one.nbytes() for one in stand_ins] == [1 << 40, 96]
    assert [event[1] for event in pool.events()] == [10, *addresses]
    allocations, recycled = found.allocations({10: 0, addresses[0]: 1}, {0: 16, 1: 1 << 40})
    assert allocations == [
        Allocation(10, 16, 0),
        Allocation(addresses[0], 1 << 40, 1),
        Allocation(addresses[1], 96, None),
    ]
    assert recycled == set()


def test_a_stand_in_that_gets_no_addresses_says_so(monkeypatch):
    class Full(FakePool):
        def allocate(self, size_bytes):
            raise offload.ExecutionError("reserving addresses: CUDA_ERROR_OUT_OF_MEMORY")

    with pytest.raises(offload.ExecutionError, match=r"^no addresses for 96 bytes: reserving"):
        pool_memory(monkeypatch, Full()).stand_in(96)


def test_settling_asks_for_the_events_of_one_launch(monkeypatch):
    """A capture of n launches must not read the allocations of all launches at each launch."""
    asked: list[int] = []

    class Pool(FakePool):
        def events(self, begin=0):
            found = super().events(begin)
            asked.append(len(found))
            return found

    pool = Pool()
    found = pool_memory(monkeypatch, pool)
    monkeypatch.setattr(
        torch, "empty", lambda size_bytes, **_: types.SimpleNamespace(data_ptr=lambda: 0)
    )
    for launch in range(50):
        pool.add("allocate", 100 * launch, 512)
        pool.add("allocate", 100 * launch + 1, 1024)
        pool.add("free", 100 * launch, 512)
        found.settle(held={100 * launch + 1})
    assert asked == [3] * 50
    assert len(found.kept) == 50


@pytest.mark.parametrize("failing", ["all", None, "inside"])
def test_the_pool_serves_nobody_afterwards_whatever_fails(monkeypatch, failing):
    """Torch's history is switched on and off by calls that may fail, as may the code between."""
    current: list[object] = []
    recorded: list[str | None] = []

    def record(enabled: str | None, **_: object) -> None:
        recorded.append(enabled)
        if enabled == failing:
            raise RuntimeError("history")

    native = types.SimpleNamespace(DiscoveryPool=types.SimpleNamespace(set_current=current.append))
    monkeypatch.setattr(torch_pool, "_native", native)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    with pytest.raises(RuntimeError), pool_memory(monkeypatch, "pool").current():
        raise RuntimeError("inside")
    assert current == ["pool", None]
    assert recorded == (["all"] if failing == "all" else ["all", None])


def test_a_memory_history_that_the_user_records_is_not_ended(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    with (
        pytest.raises(offload.CaptureError, match=r"memory history .*: end it with torch\.cuda"),
        pool_memory(monkeypatch, FakePool()).current(),
    ):
        raise AssertionError("nothing may run")
