"""Memory of executables on the simulated driver: what they share, keep, and give back."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import time
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import (
    ACT,
    IN,
    OUT,
    N,
    add,
    chain,
    on_device,
    result,
    scale,
)
from small_graphs import StepCapturer, make_program

from offload.backends.cuda import OwnedRange, backend
from offload.backends.cuda.graph import call
from offload.native import _native


class OwningCapturer(StepCapturer):
    """Its captures keep an additional object; `gone` is called at its end."""

    gone: Callable[[], None]

    def capture(self, bound, pool):
        class Owner:
            def __del__(_) -> None:
                self.gone()

        taken = super().capture(bound, pool)
        return dataclasses.replace(taken, keep=(taken.keep, Owner()))


@pytest.mark.parametrize("submitted", [False, True])
def test_what_the_graph_points_into_outlives_the_executable(device, submitted):
    constant = on_device(torch.full((N,), 5.0))
    program = make_program([(IN, N), (OUT, N)], [("0", "1")])
    steps = [lambda at: add(at, device, at.at[0], constant.data_ptr(), at.at[1])]
    capturer = OwningCapturer(steps, [OwnedRange(constant.data_ptr(), 4 * N, "the test")])
    capturer.gone = lambda: None
    run = device.load(program, steps, capturer, verify=False)
    x, y = on_device(torch.randn(N)), on_device(torch.zeros(N))
    seen = []
    capturer.gone = lambda: seen.append(torch.equal(y, x + 5))
    ticket = run.submit(x, out=(y,)) if submitted else run(x, out=(y,))
    del run, ticket
    while not seen:  # after a submission it is released on the lane's thread
        time.sleep(0.001)
    assert seen == [True]


def test_loading_twice_shares_the_arena(device):
    one = device.load(*chain(device), verify=False)
    physical = device.simulator.physical_bytes
    other = device.load(*chain(device), verify=False)
    assert other._loaded.resident.arena_address != one._loaded.resident.arena_address
    gc.collect()
    assert device.simulator.physical_bytes == physical
    x, y = on_device(torch.randn(N)), on_device(torch.zeros(N))
    for run in (one, other):
        run(x, out=(y,))
    before = [run._loaded.resident.n_set_params for run in (one, other)]
    for run in (one, other, one, other):  # each at its own addresses: nothing is updated in between
        y.zero_()
        run(x, out=(y,))
        run._loaded.resident.finish()
        assert torch.equal(y, (x * 2 + x) * 3)
        assert run.last_execution.words_patched == 0
    assert [run._loaded.resident.n_set_params for run in (one, other)] == before


def test_threads_that_load_at_once_share_the_arena(device, monkeypatch):
    """Making an arena calls the driver, and another thread may come meanwhile."""
    made: list[_native.CudaArena] = []
    make = _native.CudaArena

    def slow(index: int) -> _native.CudaArena:
        time.sleep(0.05)
        made.append(make(index))
        return made[-1]

    monkeypatch.setattr(backend._native, "CudaArena", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        arenas = list(threads.map(lambda _: backend._arena(0), range(4)))
    assert len(made) == 1
    assert all(arena is made[0] for arena in arenas)


def test_closing_gives_back_the_memory_that_no_other_needs(device):
    one = device.load(*chain(device))
    kept = device.simulator.physical_bytes
    large = [(IN, N), *[(ACT, 1 << 20)] * 2, (OUT, N)]
    program = make_program(large, [("0", "1"), ("1", "2"), ("2", "3")])
    steps = [
        lambda at, index=index: scale(at, device, at.at[index], at.at[index + 1], 1.0)
        for index in range(3)
    ]
    other = device.load(program, steps, verify=False)
    assert device.simulator.physical_bytes - kept >= 6 << 20
    other.close()
    gc.collect()
    # A discovery keeps a separate chunk for as long as its graph.
    assert device.simulator.physical_bytes - kept <= 2 << 20
    x = on_device(torch.randn(N))
    assert torch.equal(result(one, x), (x * 2 + x) * 3)


def test_what_torch_only_keeps_is_given_back_for_pools_and_the_arena(device, monkeypatch):
    """Each requests it once where memory is short, and retries once."""
    simulator, emptied = device.simulator, []
    kept: list[int] = []

    def keep() -> None:
        """All but 1 MiB of the device's memory is torch's, until it is requested."""
        simulator.set_memory_limit(64 << 30)
        kept[:] = [int(call("cuMemAlloc", 64 << 20))]
        simulator.set_memory_limit(simulator.physical_bytes + (1 << 20))

    def empty() -> None:
        emptied.append(len(kept))
        while kept:
            call("cuMemFree", kept.pop())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    keep()
    program, steps = chain(device)
    with device.load(program, steps, verify=False) as run:
        assert emptied[:1] == [1]  # for the first pool
        x = on_device(torch.randn(N))
        assert torch.equal(result(run, x), (x * 2 + x) * 3)
    resident, made = _native.CudaResident, []

    def make_resident(**given: object) -> object:
        if not made:
            keep()
        made.append(given)
        return resident(**given)

    emptied.clear()
    monkeypatch.setattr(_native, "CudaResident", make_resident)
    with device.load(program, steps, verify=False):
        assert emptied == [1]
        assert len(made) == 2
