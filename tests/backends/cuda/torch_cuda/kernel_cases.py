"""Compiled kernels on the simulated driver, by torch's real capturer: run by `test_cuda_kernels`.

As `cases`: torch's CUDA backend is a stand-in, and no GPU has run this. Inductor writes the kernels
and Triton compiles them; the simulated device computes them by Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

import triton_kernels
from cases import backend, captured_of, cuda, eager, on_cuda, settled  # noqa: F401

import offload
from offload.backends.cuda import torch_capture
from offload.compile import device_making, fuse
from offload.program import Kernel, Pointer, Role

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def launched(cuda, monkeypatch, tmp_path_factory):  # noqa: F811
    """The kernels that ran. All tests share a cache; each begins as a new process would."""
    return triton_kernels.install(monkeypatch, cuda.simulator, tmp_path_factory.getbasetemp())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        y = self.norm(nn.functional.gelu(self.linear(x), approximate="tanh") + x)
        return y, (y.softmax(-1) * 2).sum(0)


class Elementwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5, 32))

    def forward(self, x):
        return (x * self.scale + 1).relu() - x.sigmoid()


def kernel_launches(run):
    return [one for one in run.program.launches if isinstance(one.callee, Kernel)]


def functions(captured):
    """What the Program's kernels launch, from the cache."""
    return fuse(captured.bound, device=DEVICE).bound.bindings.kernels


def assert_as_eager(run, model, n_rows, seed):
    torch.manual_seed(seed)
    x = torch.randn(n_rows, 32)
    found, expected = run(x.to("cuda")), eager(model, x)
    pairs = (
        [(found, expected)]
        if isinstance(found, torch.Tensor)
        else zip(found, expected, strict=True)
    )
    for one, other in pairs:
        torch.testing.assert_close(one.to("cpu"), other, rtol=1e-5, atol=1e-5)


def test_regions_become_launches_of_kernels(launched):
    captured = captured_of(Block, torch.randn(6, 32))
    with captured.load(device=backend(), fuse=True) as run:
        (launch,) = kernel_launches(run)
        assert run.fusion.n_replaced == 6
        assert "1 x aten::addmm as recorded: computed by a library of the device" in run.explain()
        launched.names.clear()
        for seed in range(3):
            assert_as_eager(run, Block, 6, seed)
    (function,) = functions(captured)
    assert len(function.calls) > 1
    assert any(run.program.values[view.value].role is Role.SCRATCH for view in launch.made())
    assert launched.names == [call.kernel.name for call in function.calls] * 3


def test_a_node_is_launched_as_the_kernel_was_compiled():
    captured = captured_of(Elementwise, torch.randn(5, 32))
    fused = fuse(captured.bound, device=DEVICE).bound
    (call,) = fused.bindings.kernels[0].calls
    prepared = backend().prepare(fused)
    (node,) = prepared.state.capture.nodes
    _, shape, _ = node.signature
    assert shape == (*call.grid, call.kernel.n_threads, 1, 1, call.kernel.shared_bytes)
    assert node.name == call.kernel.name
    pointers = [one for one in call.parameters if isinstance(one, Pointer)]
    assert len(node.declared) == len(pointers) == 3
    words = [one.value for one in prepared.state.discovery.words]
    (launch,) = fused.program.launches
    values = [view.value for view in (*launch.views(), *launch.made())]
    assert words == [values[one.word] for one in pointers]


def test_one_capture_is_enough_where_all_launches_are_kernels(monkeypatch):
    counted = []
    capture = torch_capture._OneCapture.run
    monkeypatch.setattr(
        torch_capture._OneCapture, "run", lambda one: counted.append(one) or capture(one)
    )
    captured = captured_of(Elementwise, torch.randn(5, 32))
    with captured.load(device=backend(), fuse=True) as run:
        assert len(kernel_launches(run)) == len(run.program.launches) == 1
        assert len(counted) == 1
        assert "one capture was enough" in run.explain()
        for seed in range(3):
            assert_as_eager(run, Elementwise, 5, seed)


def test_weights_are_read_where_they_are():
    captured = captured_of(Elementwise, torch.randn(5, 32))
    (holders,) = captured.bound.bindings.weights.values()
    with captured.load(device=backend(), fuse=True) as run:
        x = torch.randn(5, 32)
        for _ in range(2):
            holders[0].mul_(-2)
            scale = holders[0].to("cpu")
            expected = (x * scale + 1).relu() - x.sigmoid()
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), expected)
        holders[0].data = torch.full((5, 32), 3.0).to("cuda")
        run.rebind_weights()
        expected = (x * 3 + 1).relu() - x.sigmoid()
        torch.testing.assert_close(run(x.to("cuda")).to("cpu"), expected)


def mixing(x, weights, mix):
    """For each weight a loop that reads it, and a product that no loop can contain."""
    for weight in weights:
        x = ((x * weight).relu() + weight.sigmoid()).view(-1, 2)
        x = (x @ mix).reshape(-1)
    return x


def test_weights_that_kernels_read_are_streamed(tmp_path):
    n, layers = 1 << 19, 3  # of 2 MiB, by which memory is mapped
    content = {f"layers.{index}": torch.randn(n) for index in range(layers)}
    mix = torch.randn(2, 2)
    safetensors.torch.save_file({**content, "mix": mix}, tmp_path / "model.safetensors")

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ParameterList(torch.zeros(n) for _ in range(layers))
            self.mix = nn.Parameter(torch.zeros(2, 2))

        def forward(self, x):
            return mixing(x, self.layers, self.mix)

    with torch.device("meta"):
        model = Deep().eval()
    captured = on_cuda(offload.capture(model, torch.zeros(n), weights=tmp_path))
    with captured.load(device=backend(), fuse=True, weights_budget=5 << 20) as run:
        assert len(kernel_launches(run)) == layers
        assert run.streaming.plan.transfers
        x = torch.randn(n)
        expected = mixing(x, content.values(), mix)
        torch.testing.assert_close(run(x.to("cuda")).to("cpu"), expected)


def test_kernels_are_found_again(monkeypatch):
    captured = captured_of(Elementwise, torch.randn(5, 32))
    first = functions(captured)

    def unused(*_, **__):
        raise AssertionError("the worker was started")

    monkeypatch.setattr(device_making, "run_worker", unused)
    assert [one.calls for one in functions(captured)] == [one.calls for one in first]
    # For another kind of GPU they are made anew.
    other = triton_kernels.H100.__dict__ | {"multi_processor_count": 78}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _=None: type("GPU", (), other)()
    )
    with pytest.raises(AssertionError, match="the worker was started"):
        functions(captured)


def test_a_damaged_entry_is_made_again(tmp_path):
    captured = captured_of(Elementwise, torch.randn(5, 32))

    def made():
        return fuse(captured.bound, device=DEVICE, cache_folder=tmp_path).bound.bindings.kernels

    first = made()
    (path,) = tmp_path.glob("*/*.json")
    document = json.loads(path.read_text())
    (kernel,) = document["kernels"].values()
    kernel["n_threads"] *= 2
    path.write_text(json.dumps(document))
    (call,), (again,) = first[0].calls, made()[0].calls
    assert again.kernel.n_threads == call.kernel.n_threads  # the code names another source file
    assert (again.kernel.name, again.grid) == (call.kernel.name, call.grid)
    assert again.parameters == call.parameters


def test_kernels_that_compute_something_else_are_not_used(launched):
    launched.is_wrong = True
    captured = captured_of(Block, torch.randn(6, 32))
    with captured.load(device=backend(), fuse=True) as run:
        assert not kernel_launches(run)
        text = run.explain()
        assert "fused: nothing" in text
        assert "native_layer_norm as recorded: its kernel failed its proof: result" in text
        assert_as_eager(run, Block, 6, 0)


def test_what_triton_refuses_stays_as_recorded(monkeypatch, tmp_path):
    captured = captured_of(Elementwise, torch.randn(5, 32))
    refusal = "Triton: it refuses"
    monkeypatch.setattr(
        device_making, "run_worker", lambda asked, _: [{"refusal": refusal} for _ in asked]
    )
    fusion = fuse(captured.bound, device=DEVICE, cache_folder=tmp_path).fusion
    assert not fusion.regions
    assert {why for _, why in fusion.kept} == {refusal}


@pytest.mark.parametrize("script", ["raise SystemExit('no room')", "print('[')"])
def test_a_worker_that_fails_is_started_again(monkeypatch, tmp_path, script):
    captured = captured_of(Elementwise, torch.randn(5, 32))
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    with monkeypatch.context() as patch:
        patch.setattr(device_making, "_WORKER", worker)
        fusion = fuse(captured.bound, device=DEVICE, cache_folder=tmp_path / "cache").fusion
        assert "the process that compiles kernels failed: " in str(fusion)
    assert fuse(captured.bound, device=DEVICE, cache_folder=tmp_path / "cache").fusion.n_kernels


def test_without_triton_all_stays_as_recorded(monkeypatch, tmp_path):
    def missing(name):
        raise device_making.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(device_making.metadata, "version", missing)
    captured = captured_of(Elementwise, torch.randn(5, 32))
    fusion = fuse(captured.bound, device=DEVICE, cache_folder=tmp_path).fusion
    assert "triton, which compiles kernels for a GPU, is not installed" in str(fusion)


def test_code_with_other_parameters_is_refused(monkeypatch, cuda):  # noqa: F811
    captured = captured_of(Elementwise, torch.randn(5, 32))

    def add_kernel(simulator, one, _):
        simulator.kernel(one.kernel.name, [8, 8, 8, 4], lambda _: None)

    monkeypatch.setattr(triton_kernels, "_add_kernel", add_kernel)
    n_modules = cuda.simulator.live("module")
    with pytest.raises(
        offload.CaptureError, match=r"of \[8, 8, 8, 4\] bytes: expected \[8, 8, 8, 4, 8"
    ):
        captured.load(device=backend(), fuse=True)
    assert cuda.simulator.live("module") == n_modules


def test_code_whose_kernel_is_not_found_is_unloaded(cuda):  # noqa: F811
    captured = captured_of(Elementwise, torch.randn(5, 32))
    n_modules = cuda.simulator.live("module")
    cuda.simulator.fail("cuModuleGetFunction", 500)
    with pytest.raises(offload.ExecutionError, match="finding a compiled kernel in its module"):
        captured.load(device=backend(), fuse=True)
    assert cuda.simulator.live("module") == n_modules
    with captured.load(device=backend(), fuse=True) as run:
        assert_as_eager(run, Elementwise, 5, 0)


def test_timing_kernels_is_refused():
    captured = captured_of(Elementwise, torch.randn(5, 32))
    with pytest.raises(offload.BindingError, match="fuse='auto' times the launches"):
        captured.load(device=backend(), fuse="auto")


def test_lanes_take_kernels():
    captured = captured_of(Block, torch.randn(6, 32))
    with captured.load(device=backend(), fuse=True, lanes=2) as run:
        assert_as_eager(run, Block, 6, 0)
