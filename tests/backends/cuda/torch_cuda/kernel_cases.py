"""Compiled kernels on the simulated driver, by torch's real capturer: run by `test_cuda_kernels`.

As `cases`: torch's CUDA backend is a stand-in, and no GPU has run this. Inductor writes the kernels
and Triton compiles them; the simulated device computes them by Triton's interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

import triton_kernels  # noqa: E402
from cases import backend, captured_of, cuda, eager, settled  # noqa: E402, F401

from offload.backends.cuda import backend as cuda_backend  # noqa: E402
from offload.backends.cuda import kernel_launcher  # noqa: E402
from offload.program import Kernel  # noqa: E402


@pytest.fixture(autouse=True)
def launched(cuda, monkeypatch, tmp_path_factory):  # noqa: F811
    """The names of the kernels that ran; all kernels are kept in one cache for these tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))
    cuda_backend._known.clear()
    return triton_kernels.install(monkeypatch, cuda.simulator)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        y = self.norm(nn.functional.gelu(self.linear(x), approximate="tanh") + x)
        return y, (y.softmax(-1) * 2).sum(0)


class Elementwise(nn.Module):
    def forward(self, x, y):
        return (x * y + 1).relu() - y.sigmoid()


def test_regions_become_launches_of_kernels(launched):
    captured = captured_of(Block, torch.randn(6, 32))
    with captured.load(device=backend(), fuse=True) as run:
        kernels = [one for one in run.program.launches if isinstance(one.callee, Kernel)]
        assert len(kernels) == 1, run.explain()
        assert run.fusion.n_replaced > 5
        assert "addmm as recorded: computed by a library of the device" in run.explain()
        launched.names.clear()
        for seed in range(3):
            torch.manual_seed(seed + 10)
            x = torch.randn(6, 32)
            found = run(x.to("cuda"))
            for one, expected in zip(found, eager(Block, x), strict=True):
                torch.testing.assert_close(one.to("cpu"), expected, rtol=1e-5, atol=1e-5)
    (function,) = (k for k in run_kernels(captured))
    assert launched.names == [call.kernel.name for call in function.calls] * 3


def run_kernels(captured):
    from offload.compile import fuse

    device = torch.device("cuda", 0)
    return fuse(captured.bound, device=device).bound.bindings.kernels
