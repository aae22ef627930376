"""Programs whose sizes vary, recorded, dispatched and promoted on the simulated driver.

Run by `test_torch_on_simulator`. Torch's own capturer captures repeated sizes, and torch's dispatch
delivers the others. No GPU has run this.
"""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))
sys.path.insert(0, str(Path(__file__).parents[3] / "models"))

import stand_in
from capturing import at_once
from cases import cuda, settled  # noqa: F401

import offload
from offload.backends.cuda import CudaBackend
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.backends.dispatched import DispatchBackend

N = Dim("n", min=2, max=400)
SIZES = (8, 9, 40)


class DispatchingBackend(CudaBackend):
    """Also lets torch deliver launches, as by default in a torch built with CUDA."""

    def __init__(self):
        super().__init__(TorchCapturer())

    @property
    def dispatch(self):
        return DispatchBackend("cuda", self.machine)


class Layers(nn.Module):
    """A mask and positions that follow from the size; two results."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        n = x.shape[0]
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = (x @ x.t()).masked_fill(mask, float("-inf")).softmax(-1)
        hidden = self.second(torch.relu(self.first(scores @ x)))
        return hidden + torch.arange(n, device=x.device).unsqueeze(1), scores


@pytest.fixture(autouse=True)
def promoted_at_once(monkeypatch):
    at_once(monkeypatch)
    monkeypatch.setattr(cuda_backend, "_known", {})


@pytest.fixture
def model(cuda):  # noqa: F811
    return Layers().eval().to("cuda")


def input_of(size):
    return torch.randn(size, 8).to("cuda")


def captured_of(model):
    with torch.no_grad():
        return offload.capture(model, input_of(12), dynamic_shapes=({0: N},))


def loaded(captured, promoted="1GiB", **options):
    sizes = offload.Sizes(promoted=promoted)
    return captured.load(DispatchingBackend(), sizes=sizes, **options)


def assert_bits(found, model, x):
    with torch.no_grad():
        expected = model(x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.to("cpu"), other.to("cpu")), len(x)


def check(run, model, size):
    """Execute and compare with eager's bits; return whether the size was promoted."""
    x = input_of(size)
    assert_bits(run(x), model, x)
    return run.last_execution.was_promoted


@pytest.mark.parametrize("is_saved", [False, True])
def test_sizes_in_any_order_before_and_after_their_promotion(model, is_saved, tmp_path):
    captured = captured_of(model)
    if is_saved:
        captured.save(tmp_path / "layers.offload")
        captured = offload.open(tmp_path / "layers.offload")
        assert captured.program.device == "cuda"
    with loaded(captured) as run:
        seen = [check(run, model, size) for _ in range(3) for size in SIZES]
        assert seen == [False] * 3 + [True] * 6
        others = iter(range(300, 200, -1))  # each comes once
        for size in random.Random(0).choices((*SIZES, 0), k=20):
            assert check(run, model, size or next(others)) == (size in SIZES)
        own = dict(run._promoter.executables())
        assert {one.mode for each in own.values() for one in each.launch_reports()} == {"graph"}


@pytest.mark.parametrize("is_eager", [False, True])
def test_tickets_while_sizes_are_promoted_and_evicted(cuda, model, is_eager):  # noqa: F811
    """There is room for two sizes; on the late device nothing runs before it is waited for."""
    cuda.simulator.set_eager(is_eager)
    captured = captured_of(model)
    with loaded(captured) as run:
        check(run, model, 9), check(run, model, 9)
        size_bytes = run.instances.promotion.size_bytes
    choose = random.Random(2)
    with loaded(captured, promoted=5 * size_bytes // 2) as run:
        for _ in range(6):
            given = [input_of(size) for size in choose.choices((*SIZES, 2, 100), k=5)]
            tickets = [run.submit(x) for x in given]
            for x, ticket in zip(given, tickets, strict=True):
                assert_bits(ticket.result(), model, x)
        report = run.instances.promotion
        assert report.n_demoted > 0
        assert report.size_bytes <= report.budget_bytes


def test_what_is_in_one_arena_counts_for_no_instance(cuda, model):  # noqa: F811
    """Each choice of sizes as a task: none is evicted for the shared memory of a library."""
    with captured_of(model).load(
        DispatchingBackend(), sizes=offload.Sizes(), scheduling="offload"
    ) as run:
        for size in (*SIZES, *SIZES):
            x = input_of(size)
            assert_bits(run(x), model, x)
        one = run.at({"n": 8})
        assert one.feature_map_bytes > stand_in.WORKSPACE_BYTES
        assert run.sizes.budget_bytes < 2 * stand_in.WORKSPACE_BYTES
        assert (run.instances.misses, run.instances.evicted) == (3, 0)
        assert run.instances.kept_bytes < stand_in.WORKSPACE_BYTES


def held_bytes(cuda):  # noqa: F811
    """The device's memory that is in use, without caches of torch and its libraries."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return cuda.simulator.physical_bytes


def test_many_sizes_take_the_memory_of_the_largest(cuda):  # noqa: F811
    """At most 1.1 times, including graphs: the largest alone, and 32 beside one another."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).eval().to("cuda")
    captured = captured_of(model)
    sizes = range(369, 401)
    taken = []
    for chosen in (sizes[-1:], sizes):
        before, graph_bytes = held_bytes(cuda), 0
        with captured.load(
            DispatchingBackend(), sizes=offload.Sizes(instances="1GiB"), scheduling="offload"
        ) as run:
            cuda.simulator.set_node_bytes(4 << 10)
            for size in chosen:
                x = input_of(size)
                with torch.no_grad():
                    assert torch.equal(run(x).to("cpu"), model(x).to("cpu"))
                graph_bytes += run.at({"n": size}).memory_report().graph_bytes
            cuda.simulator.set_node_bytes(0)
            assert graph_bytes > 0
            assert run.instances.kept == len(chosen)
            assert run.instances.kept_bytes > graph_bytes
            taken.append(held_bytes(cuda) - before + graph_bytes)
    alone, together = taken
    assert alone > stand_in.WORKSPACE_BYTES
    assert alone < together <= 1.1 * alone


def test_what_takes_a_program_of_one_size_is_refused(model):
    captured = captured_of(model)
    refused = [
        ({"fuse": True}, None, "kernels are made for one choice of sizes"),
        ({"fuse": True}, "1GiB", "sizes that repeat are executed as one task"),
        ({"weights_budget": "1MiB"}, None, "is for a program of one size"),
    ]
    for options, promoted, why in refused:
        with pytest.raises(offload.BindingError, match=why):
            loaded(captured, promoted, **options)
