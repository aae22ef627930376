"""Sizes that repeat are promoted to graphs on the simulated driver; others are dispatched.

The simulated device takes tensors of the CPU, so launches dispatched by the host run at once,
without a stream: tests/npu has both on a device with streams.
"""

from __future__ import annotations

import ctypes
import random

import capturing
import pytest
import torch
from capturing import check, loaded
from promoting import SIZES

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

import simulated_backend

from offload.backends.cuda import backend as cuda_backend
from offload.backends.dispatched import DispatchBackend


class PromotingBackend(simulated_backend.SimulatedBackend):
    """Lets torch's operators deliver sizes that are not promoted."""

    @property
    def dispatch(self):
        return DispatchBackend(self.name, self.machine, "cpu")


@pytest.fixture
def backend(simulator, monkeypatch):
    capturing.at_once(monkeypatch)
    monkeypatch.setattr(cuda_backend, "_known", {})
    return simulated_backend.install(simulator, monkeypatch, PromotingBackend(simulator))


def test_feature_maps_lie_in_one_arena_that_is_poisoned_between(backend):
    with loaded(backend=backend) as run:
        for size in (*SIZES, *SIZES):
            check(run, torch.randn(size, 16))
        own = dict(run._promoter.executables())
        arena = cuda_backend._arenas[0]
        most_bytes = max(one.feature_map_bytes for one in own.values())
        granule_bytes = 2 << 20
        assert arena.size_bytes == -(-most_bytes // granule_bytes) * granule_bytes
        addresses = [one._loaded.resident.arena_address for one in own.values()]
        assert len(set(addresses)) == len(SIZES)  # each its own address in the same memory
        ctypes.memset(addresses[0], 0x5A, 1)
        assert [ctypes.string_at(one, 1) for one in addresses] == [b"\x5a"] * len(SIZES)
        others = iter(range(300, 200, -1))  # each comes once
        for size in random.Random(0).choices((*SIZES, 0), k=30):
            ctypes.memset(addresses[0], 0xFF, most_bytes)
            assert check(run, torch.randn(size or next(others), 16)) == (size in SIZES)


def test_what_graphs_take_of_the_device_counts(backend, simulator):
    """By the driver's free memory; the arena does not count, and weights are the model's."""
    x = torch.randn(8, 16)
    sizes_bytes = []
    for node_bytes in (0, 64 << 10):
        simulator.set_node_bytes(node_bytes)
        with loaded(backend=backend) as run:
            run(x), run(x)
            sizes_bytes.append(run.instances.promotion.size_bytes)
            ((_, own),) = run._promoter.executables()
            n_nodes = own.memory_report().graph_bytes // (64 << 10)
            assert (n_nodes > 0) == (node_bytes > 0)
    assert sizes_bytes[1] - sizes_bytes[0] == n_nodes * (64 << 10)
    with loaded(promoted=sizes_bytes[0] + (16 << 10), backend=backend) as run:
        for _ in range(3):
            assert not check(run, x)
        ((_, why),) = run.instances.promotion.refused
        assert "and all may take" in why


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["cuStreamBeginCapture", "cuGraphInstantiateWithFlags", "cuMemMap"]
)
def test_a_size_whose_capture_fails_goes_on_launch_by_launch(backend, simulator, call):
    with loaded(backend=backend) as run:
        x = torch.randn(8, 16)
        run(x)
        simulator.fail(call, 999)
        for _ in range(3):
            assert not check(run, x)
        simulator.forget_calls()
        ((sizes, why),) = run.instances.promotion.refused
        assert sizes == (("n", 8),)
        assert "Error: " in why or "OutOfMemory: " in why
        assert simulator.live("executable") == 0
        assert [check(run, torch.randn(9, 16)) for _ in range(2)] == [False, True]
