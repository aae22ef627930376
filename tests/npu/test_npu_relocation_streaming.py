"""Models of torch_npu with weights under a budget, with their kernels' own arguments patched."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_simulator import AscendSimulator
from budgets import floor_of, weight_bytes
from npu_draws import check_draws, default_generator, states
from npu_loading import live
from npu_models import Layers
from on_npu import check_same, fail_each_call
from relocated_models import COPIED, RELOCATED, counts, notes, require_relocation, without
from stored import save_weights, without_memory
from torch import nn

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend, torch_backend
from offload.backends.ascend.torch_backend import TorchAscendWeights
from offload.native import _native


@pytest.fixture
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed relocation is refused."""
    make = functools.partial(TorchAscendBackend, relocation=True)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})


class Few(nn.Module):
    """Three layers, two of which are streamed at the floor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Drawing(Few):
    """The same with random numbers between the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + torch.rand_like(x)
        return x


class Summing(Few):
    """The same with a buffer that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(2048.0).view(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += super().forward(x)
        return self.total * 2


def stored(
    build: type[nn.Module], folder: Path, n_rows: int = 4
) -> tuple[nn.Module, offload.Captured]:
    """A model, and a capture of it with its weights in a file."""
    model = build().eval()
    save_weights(model, folder)
    given = torch.zeros(n_rows, 64).npu()
    return model, offload.capture(without_memory(build), given, weights=folder)


@pytest.mark.usefixtures("required")
def test_every_budget_moves_every_slot(tmp_path: Path) -> None:
    model, captured = stored(Layers, tmp_path)
    floor, whole = floor_of(captured), weight_bytes(captured.program)
    kept = []
    for budget in (floor, (floor + whole) // 2, floor + whole):
        with captured.load(weights_budget=budget) as run:
            assert RELOCATED in notes(run)
            assert "is copied" not in notes(run)
            assert "the feature map can move" in notes(run)
            plan = run.streaming.plan
            assert bool(plan.transfers) == (budget < whole)
            assert run.streaming.bytes_moved == 0  # those of the proof do not count
            for moves in (False, True, True, False):
                x, out = torch.randn(4, 64), torch.full((4, 64), float("nan")).npu()
                given = x.npu()
                memory = torch.full((run.feature_map_bytes,), 255, dtype=torch.uint8).npu()
                run(given, out=out, feature_map=memory if moves else None)
                check_same(out, model(x))
                assert bool((memory == 255).all()) is not moves
                assert run.last_execution.bytes_copied == 0
                assert run.last_execution.bytes_streamed == plan.transfer_bytes
                kept += [given, out, memory]
            assert run.streaming.bytes_moved == 4 * plan.transfer_bytes
            copied = run._loaded.resident.copy_counts
            assert (copied["enqueued"], copied["refreshes"]) == (0, 0)


@pytest.mark.usefixtures("required")
def test_one_copy_brings_the_range_that_a_moved_slot_changes(tmp_path: Path) -> None:
    _, captured = stored(Few, tmp_path)
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert run.streaming.plan.transfers
        x, out = torch.ones(4, 64).npu(), torch.ones(4, 64).npu()
        run(x, out=out)
        for tensors, n_words in (((x, out), 0), ((x.clone(), out), 1), ((x, out.clone()), 2)):
            before = counts(run)
            run(tensors[0], out=tensors[1])
            assert run.last_execution.words_patched == n_words
            copies, n_bytes = (now - then for now, then in zip(counts(run), before, strict=True))
            assert copies == min(1, n_words)
            assert n_bytes == 8 * n_words or (n_words > 1 and n_bytes > 8 * n_words)


@pytest.mark.usefixtures("required")
def test_weights_are_read_into_one_memory_for_all_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    _, captured = stored(Few, tmp_path)
    taken = []
    take = TorchAscendBackend.weight_memory

    def noted(self: TorchAscendBackend, index: int, size_bytes: int) -> object:
        taken.append(size_bytes)
        return take(self, index, size_bytes)

    monkeypatch.setattr(TorchAscendBackend, "weight_memory", noted)
    simulated_npu.forget_calls()
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert taken == [run.streaming.plan.memory_bytes]
        assert simulated_npu.calls("aclmdlRICaptureBegin") == 3
        # One store, and memory by which the launch timer blocks a stream.
        n_slabs = len(run.streaming.plan.transfers)
        assert simulated_npu.calls("aclrtMallocHost") == n_slabs + 1


@pytest.mark.usefixtures("required")
def test_weights_are_replaced_between_executions(tmp_path: Path) -> None:
    model, captured = stored(Layers, tmp_path)
    with captured.load(weights_budget=floor_of(captured)) as run:
        x = torch.randn(4, 64)
        check_same(run(x.npu()), model(x))
        other = Layers().eval()
        run.streaming.replace({name: one.detach() for name, one in other.state_dict().items()})
        check_same(run(x.npu()), other(x))


@pytest.mark.usefixtures("required")
def test_models_that_draw(tmp_path: Path) -> None:
    model, captured = stored(Drawing, tmp_path)
    on_npu = model.npu()
    state = states([default_generator()])
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert run.streaming.plan.transfers
        assert states([default_generator()]) == state
        drawn = [check_draws(run, on_npu, torch.ones(4, 64).npu()) for _ in range(3)]
        assert not torch.equal(drawn[0], drawn[1])
        assert "the feature map can move" in notes(run)


@pytest.mark.usefixtures("required")
def test_the_proof_leaves_weights_that_are_written(tmp_path: Path) -> None:
    model, captured = stored(Summing, tmp_path, n_rows=32)
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert run.streaming.plan.transfers
        for _ in range(3):
            x = torch.randn(32, 64)
            check_same(run(x.npu()), model(x))


@pytest.mark.parametrize("index", [0, 1, -2, -1])
def test_the_proof_finds_words_that_were_missed(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    model, captured = stored(Few, tmp_path)
    budget = floor_of(captured)
    with captured.load(weights_budget=budget) as run:
        n_words = int(notes(run).split(" words")[0].split()[-1])
    before = held(simulated_npu)
    with monkeypatch.context() as patched:
        without(patched, index % n_words)
        with captured.load(weights_budget=budget) as run:  # which copies moved slots instead
            assert f"{COPIED}: the proof at load failed" in notes(run)
            x = torch.randn(4, 64)
            check_same(run(x.npu()), model(x))
        assert held(simulated_npu) == before
        require_relocation(patched)
        with pytest.raises(offload.CaptureError, match=r"gives a different result|still writes"):
            captured.load(weights_budget=budget)
    assert held(simulated_npu) == before
    with captured.load(weights_budget=budget) as run:
        x = torch.randn(4, 64)
        check_same(run(x.npu()), model(x))


def held(simulator: AscendSimulator) -> tuple[int, ...]:
    kinds = ("host memory", "capture")
    return (*live(simulator), *(simulator.live(kind) for kind in kinds), _native.ascend_streams())


class Two(nn.Module):
    """Two launches, each of which has its weight copied."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, self.weights[0]), self.weights[1])


@pytest.mark.parametrize(
    "function",
    [
        "aclmdlRICaptureBegin",
        "aclmdlRICaptureEnd",
        "aclmdlRITaskGetParams",
        "aclrtMalloc",
        "aclrtMallocHost",
        "aclrtCreateEventExWithFlag",
        "aclrtCreateEventWithFlag",
        "aclmdlRIExecuteAsync",
    ],
)
@pytest.mark.usefixtures("required")
def test_failures_of_a_load_leave_nothing(
    function: str, tmp_path: Path, simulated_npu: AscendSimulator
) -> None:
    """Of calls that torch also makes, where a failure is permanent: see test_npu_streaming."""
    model, captured = stored(Two, tmp_path)
    budget = floor_of(captured)
    captured.load(weights_budget=budget).close()
    before = held(simulated_npu)

    def check(call: str) -> None:
        assert held(simulated_npu) == before, call

    fail_each_call(
        simulated_npu, function, lambda: captured.load(weights_budget=budget).close(), check
    )
    with captured.load(weights_budget=budget) as run:
        x = torch.randn(4, 64)
        check_same(run(x.npu()), model(x))


class Wide(nn.Module):
    """Weights of 16 MiB, of which little is used."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(65536, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for table in self.tables:
            x = torch.relu(x + table[-4:])
        return x


def test_less_memory_gives_smaller_budgets(tmp_path: Path, simulated_npu: AscendSimulator) -> None:
    model, captured = stored(Wide, tmp_path)
    captured.load().close()
    before = held(simulated_npu)
    x = torch.randn(4, 64)
    expected, weights_bytes = model(x), []
    try:
        for n_mib in (16, 40, 60, 80, 100):
            simulated_npu.set_memory_limit(before[3] + (n_mib << 20))
            try:
                with captured.load(weights_budget="auto") as run:
                    check_same(run(x.npu()), expected)
                    assert RELOCATED in notes(run)
                    weights_bytes.append(run.streaming.plan.memory_bytes)
            except (offload.OutOfMemory, offload.PlanError):
                weights_bytes.append(0)
            torch.npu.empty_cache()
            simulated_npu.set_memory_limit(64 << 30)
            assert held(simulated_npu) == before, n_mib
    finally:
        simulated_npu.set_memory_limit(64 << 30)
    assert weights_bytes == sorted(weights_bytes)
    assert len(set(weights_bytes)) > 3


def test_a_budget_that_is_tried_anew_finds_nothing_of_the_one_before(
    tmp_path: Path, simulated_npu: AscendSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one finds no memory for the proof, after all other memory was allocated."""
    model, captured = stored(Few, tmp_path)
    captured.load().close()
    kinds = ("model", "event", "host memory")
    before = held(simulated_npu)
    tried, prepare, prove = [], TorchAscendWeights.prepare_streamed, torch_backend.prove_relocation

    def noted(self: TorchAscendWeights, *args: Any) -> object:
        torch.npu.synchronize()
        there = [simulated_npu.live(kind) for kind in kinds]
        tried.append((*there, _native.ascend_streams(), torch.npu.memory_allocated()))
        return prepare(self, *args)

    def prove_or_not(*args: Any) -> None:
        if len(tried) < 3:
            raise offload.OutOfMemory("for the proof")
        prove(*args)

    monkeypatch.setattr(TorchAscendWeights, "prepare_streamed", noted)
    monkeypatch.setattr(torch_backend, "prove_relocation", prove_or_not)
    with captured.load(weights_budget="auto") as run:
        assert len(tried) == 3
        assert len(set(tried)) == 1
        x = torch.randn(4, 64)
        check_same(run(x.npu()), model(x))
        assert RELOCATED in notes(run)
    assert held(simulated_npu) == before
