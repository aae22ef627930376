"""Weights of torch_npu models under a budget, on the simulated NPU, against the CPU."""

from __future__ import annotations

import functools
import gc
import itertools
from pathlib import Path

import pytest
import torch
from ascend_simulator import AscendSimulator
from on_npu import check_same
from stored import save_weights, without_memory
from test_streaming import floor_of, weight_bytes
from torch import nn

import offload
from offload import _native, backends
from offload.backends.ascend import TorchAscendBackend


class Layers(nn.Module):
    """Layers of unlike sizes, so that places in the ring are shared by several."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 64, 96, 64, 128, 64, 96, 64]
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(params=["captured", "enqueued"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who copies inputs and outputs."""
    make = functools.partial(TorchAscendBackend, copies=request.param)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    return request.param


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    model = Layers().eval()
    save_weights(model, tmp_path)
    return model


@pytest.fixture
def captured(model: nn.Module, tmp_path: Path) -> offload.Captured:
    given = torch.zeros(4, 64).npu()
    return offload.capture(without_memory(Layers), given, weights=tmp_path)


def check(run: offload.Executable, model: nn.Module) -> None:
    for _ in range(3):
        x = torch.randn(4, 64)
        check_same(run(x.npu()), model(x))


def test_relocation_that_is_required_is_refused_with_weights_in_files(
    monkeypatch: pytest.MonkeyPatch, captured: offload.Captured
) -> None:
    make = functools.partial(TorchAscendBackend, relocation=True)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    with pytest.raises(offload.CaptureError, match=r"relocation=True: weights are streamed"):
        captured.load()


def test_every_budget_gives_the_results_of_the_cpu(
    form: str, model: nn.Module, captured: offload.Captured
) -> None:
    floor, whole = floor_of(captured), weight_bytes(captured.program)
    assert floor < whole
    for budget in (floor, (floor + whole) // 2, floor + whole):
        with captured.load(weights_budget=budget) as run:
            plan = run.streaming.plan
            assert plan.memory_bytes <= budget
            assert bool(plan.transfers) == (budget < whole)
            check(run, model)
            moved = run.streaming.bytes_moved
            check(run, model)
            assert run.streaming.bytes_moved - moved == 3 * plan.transfer_bytes
            assert plan.transfer_bytes == whole - plan.resident_bytes
            assert run.last_execution.bytes_streamed == plan.transfer_bytes


def test_weights_are_replaced_between_executions(
    model: nn.Module, captured: offload.Captured
) -> None:
    with captured.load(weights_budget=floor_of(captured)) as run:
        check(run, model)
        other = Layers().eval()
        run.streaming.replace({name: one.detach() for name, one in other.state_dict().items()})
        check(run, other)


def test_nothing_is_left(
    simulated_npu: AscendSimulator, model: nn.Module, captured: offload.Captured
) -> None:
    budget = floor_of(captured)
    captured.load(weights_budget=budget).close()
    gc.collect()
    torch.npu.synchronize()
    kinds = ("model", "event", "registration")
    held = [simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()
    with captured.load(weights_budget=budget) as run:
        assert _native.ascend_streams() == held[1] + 3  # the model's two, and that which it runs on
        check(run, model)
    torch.npu.synchronize()
    assert ([simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()) == held


@pytest.mark.parametrize(
    ("function", "nth"),
    [
        ("aclrtMemcpyAsync", 1),
        ("aclrtMemcpyAsync", 3),
        ("aclrtStreamWaitEvent", 3),
        ("aclrtHostRegisterV2", 1),
        ("aclrtCreateEventExWithFlag", 5),
        ("aclmdlRICaptureEnd", 1),
    ],
)
def test_a_failed_load_leaves_nothing(
    function: str,
    nth: int,
    simulated_npu: AscendSimulator,
    model: nn.Module,
    captured: offload.Captured,
) -> None:
    budget = floor_of(captured)
    captured.load(weights_budget=budget).close()
    gc.collect()
    torch.npu.synchronize()
    kinds = ("model", "event", "registration", "capture")
    held = [simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()
    simulated_npu.fail(function, 507000, nth)
    with pytest.raises(offload.OffloadError, match="507000"):
        captured.load(weights_budget=budget)
    simulated_npu.forget_calls()
    gc.collect()
    torch.npu.synchronize()
    assert ([simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()) == held
    with captured.load(weights_budget=budget) as run:
        check(run, model)


def test_a_model_on_the_device_has_no_store(model: nn.Module) -> None:
    captured = offload.capture(model.npu(), torch.zeros(4, 64).npu())
    with pytest.raises(offload.BackendUnavailable, match="capture with weights="):
        captured.load(weights_budget="1 MiB")


@pytest.mark.usefixtures("simulated_npu")
def test_weights_that_the_device_has_no_memory_for() -> None:
    with pytest.raises(offload.OutOfMemory, match="bytes of weights failed"):
        TorchAscendBackend().weight_memory(0, 1 << 46)
