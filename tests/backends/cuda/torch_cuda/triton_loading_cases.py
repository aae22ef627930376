"""A model's own Triton kernels with streamed weights, fused kernels, and several devices.

run by `test_cuda_triton_kernels`, as `triton_cases`. No GPU has run this.
"""

from __future__ import annotations

import operator
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

from cases import backend, cuda, on_cuda, settled  # noqa: F401
from triton_checks import (
    add,
    add_kernel,
    assert_as_eager,
    captured_of,
    kernels_of,
    launched,  # noqa: F401
)

import offload
from offload.load import devices as device_loading

N = 1 << 20  # 4 MiB of float32, so that a weight is larger than the 2 MiB by which memory is mapped
LAYERS = 5


class Adding(nn.Module):
    """Adds each of its weights by a kernel of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(N) for _ in range(LAYERS))

    def forward(self, x):
        for weight in self.layers:
            out = torch.empty_like(x)
            add_kernel[(N >> 16,)](x, weight, out, N, 1 << 16)
            x = out * 0.5
        return x


@pytest.fixture
def stored(tmp_path):
    """A model whose weights are in a file, and what it computes."""
    content = {f"layers.{index}": torch.randn(N) for index in range(LAYERS)}
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Adding().eval()
    captured = on_cuda(offload.capture(model, torch.zeros(N), weights=tmp_path))

    def compute(x):
        for index in range(LAYERS):
            x = (x + content[f"layers.{index}"]) * 0.5
        return x

    return captured, compute


def test_weights_that_kernels_read_are_streamed(stored):
    captured, compute = stored
    assert len(kernels_of(captured)) == LAYERS
    with captured.load(device=backend(), weights_budget=12 << 20) as run:
        assert run.streaming.plan.transfers
        for _ in range(3):
            x = torch.randn(N)
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), compute(x))


def test_kernels_between_fused_regions():
    """Loops before and behind become kernels of Inductor; the model's own stays between them."""

    def model(x):
        y = torch.relu(x * 2 + 1)
        out = torch.empty_like(y)
        add_kernel[(3,)](y, x, out, 40, 16)
        return torch.sigmoid(out * 3 - 1) * out

    captured = captured_of(model, torch.randn(40))
    with captured.load(device=backend(), fuse=True) as run:
        assert len(run.fusion.regions) == 2
        for _ in range(2):
            x = torch.randn(40)
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), model(x))
    assert_as_eager(captured, model, torch.randn(40))


def test_kernels_of_a_file_over_several_devices(tmp_path, monkeypatch):
    """A file has no code until they are compiled, and slices for trials are prepared before.

    Both devices are one GPU.
    """
    monkeypatch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)

    def model(x):
        y = torch.relu(x * 2 + 1)
        return torch.sigmoid(add(y, x) * 3 - 1)

    captured = captured_of(model, torch.randn(40))
    captured.save(tmp_path / "model.offload")
    for one in (offload.open(tmp_path / "model.offload", triton=True), captured):
        with one.load([backend(), backend()]) as run:
            assert "cannot run" not in run.explain()
            for _ in range(3):
                x = torch.randn(40)
                torch.testing.assert_close(run(x.to("cuda")).to("cpu"), model(x))


def test_kernels_between_launches_on_the_host(monkeypatch, cuda):  # noqa: F811
    """Torch's launches run on the CPU where the plan says so, the kernels on their GPU."""
    monkeypatch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)
    cuda.simulator.set_eager(False)

    def model(x, y):
        sums = [add(one, y) for one in (x * 2, y * 3, x - y)]
        return torch.tanh(sums[0]) + sums[1] * add(sums[2], x)

    captured = captured_of(model, torch.randn(40), torch.randn(40))
    with captured.load(["cpu", backend()]) as run:
        assert "it is compiled code for the recorded device" in run.explain()
        for _ in range(3):
            x, y = torch.randn(40), torch.randn(40)
            expected = model(x, y)  # first, as Triton's interpreter has one thread
            torch.testing.assert_close(run(x.to("cuda"), y.to("cuda")).to("cpu"), expected)


@pytest.mark.parametrize("is_inside", [False, True])
def test_kernels_that_a_compiled_function_launches(is_inside):
    """It is recorded as its original, whose kernels are launches; Inductor compiles nothing."""

    def model(x, y):
        return add(x, y).relu() + add(y, y)

    def compiles(x, y):
        return torch.compile(model)(x, y)

    compiled = compiles if is_inside else torch.compile(model, fullgraph=True)
    captured = captured_of(compiled, torch.randn(40), torch.randn(40))
    assert len(kernels_of(captured)) == 2
    assert "compiled by torch.compile, and recorded as the" in captured.program.notes[0]
    assert_as_eager(captured, model, torch.randn(40), torch.randn(40))


@pytest.mark.parametrize("is_functional", [False, True])
def test_launches_in_traced_graphs(is_functional, tmp_path):
    """As torch.compile(backend="offload") and torch.export leave them: as higher-order operators.

    Dynamo traces no kernel that Triton interprets, so the graph is made here.
    """
    table = triton_kernel_wrap.kernel_side_table
    given = {
        "kernel_idx": table.add_kernel(add_kernel),
        "constant_args_idx": table.add_constant_args({"n": 40, "BLOCK": 16}),
        "grid": [(3, 1, 1)],
        "tma_descriptor_metadata": {},
    }
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    out = graph.call_function(torch.empty_like, (x,))
    given["kwargs"] = {"x": x, "y": y, "out": out}
    if is_functional:
        given["tensors_to_clone"] = ["out"]
        launch = triton_kernel_wrap.triton_kernel_wrapper_functional
        out = graph.call_function(operator.getitem, (graph.call_function(launch, (), given), "out"))
    else:
        graph.call_function(triton_kernel_wrap.triton_kernel_wrapper_mutation, (), given)
    graph.output(graph.call_function(torch.relu, (out,)))
    captured = captured_of(torch.fx.GraphModule(nn.Module(), graph), *torch.randn(2, 40))
    assert len(kernels_of(captured)) == 1
    captured.save(tmp_path / "model.offload")
    again = offload.open(tmp_path / "model.offload", triton=True)
    assert_as_eager(again, lambda x, y: (x + y).relu(), *torch.randn(2, 40))
