"""Weights of torch_npu models under a budget: against the CPU, and against resident weights."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ascend_simulator import AscendSimulator
from budgets import Deep, budget_steps, floor_of, weight_bytes
from npu_models import Block, Layers
from on_npu import check_same
from stored import save_weights, without_memory
from torch import nn

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend
from offload.backends.ascend.torch_memory import TorchMemoryUnit
from offload.backends.captured.device_streaming import store_bytes
from offload.native import _native


@pytest.fixture(params=["captured", "enqueued"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form of copies of inputs and outputs, where they are copied."""
    make = functools.partial(TorchAscendBackend, copies=request.param, relocation=False)
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


def test_every_budget_gives_the_results_of_the_cpu(
    form: str, model: nn.Module, captured: offload.Captured
) -> None:
    floor, whole = floor_of(captured), weight_bytes(captured.program)
    assert floor < whole
    for budget in (floor, (floor + whole) // 2, floor + whole):
        with captured.load(weights_budget=budget) as run:
            plan = run.streaming.plan
            assert plan.taken_bytes <= budget
            assert bool(plan.transfers) == (budget < whole)
            check(run, model)
            moved = run.streaming.bytes_moved
            check(run, model)
            assert run.streaming.bytes_moved - moved == 3 * plan.transfer_bytes
            assert plan.transfer_bytes == whole - plan.resident_bytes
            assert run.last_execution.bytes_streamed == plan.transfer_bytes


def build_decoder() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 64), Block(64, 4, fused=True), nn.Linear(64, 100))


BUILT: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "layers": (Layers, lambda: torch.randn(4, 64)),
    "deep": (Deep, lambda: torch.randn(4, 128)),  # it writes a buffer, and uses a layer twice
    "attention by parts": (lambda: Block(64, 4, fused=False), lambda: torch.randn(2, 5, 64)),
    "decoder": (build_decoder, lambda: torch.randint(0, 100, (2, 7))),
}


@pytest.mark.parametrize("name", BUILT)
def test_every_step_of_the_budget_gives_the_bits_of_resident_weights(
    name: str, tmp_path: Path
) -> None:
    build, make = BUILT[name]
    save_weights(build().eval(), tmp_path)
    inputs = [make() for _ in range(3)]
    captured = offload.capture(without_memory(build), inputs[0].npu(), weights=tmp_path)
    with captured.load() as resident:
        assert resident.streaming.plan.is_resident
        expected = [resident(one.npu()).cpu() for one in inputs]
    assert not torch.equal(expected[0], expected[1])
    steps = budget_steps(captured, TorchAscendBackend())
    assert len(steps) > 4
    for budget in steps:
        with captured.load(weights_budget=budget, verify=False) as run:
            plan = run.streaming.plan
            assert plan.taken_bytes <= budget
            for one, wanted in zip(inputs, expected, strict=True):
                assert torch.equal(run(one.npu()).cpu(), wanted)
                assert run.last_execution.bytes_streamed == plan.transfer_bytes
    assert plan.is_resident


@pytest.mark.parametrize("name", BUILT)
def test_weights_in_files_give_the_bits_of_the_model_on_the_device(
    name: str, tmp_path: Path
) -> None:
    build, make = BUILT[name]
    model = build().eval()
    save_weights(model, tmp_path)
    given = make()
    captured = offload.capture(without_memory(build), given.npu(), weights=tmp_path)
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert run.streaming.plan.transfers
        found = run(given.npu()).cpu()
    in_memory = offload.capture(model.npu(), given.npu())
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    with in_memory.load() as resident:
        assert torch.equal(resident(given.npu()).cpu(), found)


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
    kinds = ("model", "event", "host memory")
    held = [simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()
    with captured.load(weights_budget=budget) as run:
        assert _native.ascend_streams() == held[1] + 3  # the model's two, and its execution stream
        check(run, model)
    torch.npu.synchronize()
    assert ([simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()) == held


@pytest.mark.parametrize(
    ("function", "nth"),
    [
        ("aclrtMemcpyAsync", 1),
        ("aclrtMemcpyAsync", 3),
        ("aclrtStreamWaitEvent", 3),
        ("aclrtMallocHost", 1),
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
    captured.load(weights_budget=budget, verify=False).close()  # makes no calls of the timer
    gc.collect()
    torch.npu.synchronize()
    kinds = ("model", "event", "host memory", "capture")
    held = [simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()
    simulated_npu.fail(function, 507000, nth)
    with pytest.raises(offload.OffloadError, match="507000"):
        captured.load(weights_budget=budget, verify=False)
    simulated_npu.forget_calls()
    gc.collect()
    torch.npu.synchronize()
    assert ([simulated_npu.live(kind) for kind in kinds], _native.ascend_streams()) == held
    with captured.load(weights_budget=budget) as run:
        check(run, model)


@pytest.mark.parametrize(
    "size_bytes", [1, 480, 481, 512, 2**20, 5 * 2**20, 12 * 2**20, 13 * 2**20, 21 * 2**20 + 1]
)
def test_weights_take_what_torch_gives(size_bytes: int) -> None:
    backend = TorchAscendBackend()
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    memory = backend.weight_memory(0, size_bytes)
    assert torch.npu.memory_allocated() - before == TorchMemoryUnit().taken_bytes(size_bytes)
    memory.release()
    assert torch.npu.memory_allocated() == before


def test_executables_share_what_is_streamed(
    simulated_npu: AscendSimulator, model: nn.Module, captured: offload.Captured, tmp_path: Path
) -> None:
    """Of one program, and of another one of the same files: the bytes are pinned once."""
    single = offload.capture(without_memory(Layers), torch.zeros(1, 64).npu(), weights=tmp_path)
    budget = floor_of(captured)
    captured.load(weights_budget=budget, verify=False).close()
    gc.collect()
    before = simulated_npu.host_bytes
    with captured.load(weights_budget=budget) as one:
        needed = simulated_npu.host_bytes - before
        assert needed == store_bytes(one.streaming.plan)
        with (
            captured.load(weights_budget=budget) as other,
            single.load(weights_budget=budget) as third,
        ):
            assert simulated_npu.host_bytes - before == needed
            assert third.streaming.shared_store_bytes == third.streaming.plan.transfer_bytes
            check(one, model)
            check(other, model)
            x = torch.randn(1, 64)
            check_same(third(x.npu()), model(x))
            with pytest.raises(offload.ExecutionError, match="share_store=False"):
                one.streaming.replace({"layers.0.weight": torch.zeros(128, 64)})
            check(one, model)
        check(one, model)
        new = Layers().eval()
        one.streaming.replace({name: each.detach() for name, each in new.state_dict().items()})
        check(one, new)
    assert simulated_npu.host_bytes == before


def test_a_model_on_the_device_has_no_store(model: nn.Module) -> None:
    captured = offload.capture(model.npu(), torch.zeros(4, 64).npu())
    with pytest.raises(offload.BackendUnavailable, match="capture with weights="):
        captured.load(weights_budget="1 MiB")


@pytest.mark.usefixtures("simulated_npu")
def test_weights_that_the_device_has_no_memory_for() -> None:
    with pytest.raises(offload.OutOfMemory, match="bytes for weights failed"):
        TorchAscendBackend().weight_memory(0, 1 << 46)
