"""What cases of Triton kernels share: captures as if on the simulated device, and two kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

import triton_kernels
from cases import backend, cuda, on_cuda  # noqa: F401

import offload
from offload.api import block_recording
from offload.compile import compiled_triton
from offload.program import TritonKernel

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def launched(cuda, monkeypatch, tmp_path_factory):  # noqa: F811
    """The kernels that ran. All tests share a cache; recordings on the CPU compile for the GPU."""

    def compile_triton(kernel, device):
        found = compiled_triton(kernel, DEVICE)
        return found.kernel, found.written

    monkeypatch.setattr(block_recording, "triton_compiler", lambda _: compile_triton)
    return triton_kernels.install(monkeypatch, cuda.simulator, tmp_path_factory.getbasetemp())


def captured_of(function, *inputs):
    with offload.capture(function) as captured:
        captured(*inputs)
    return on_cuda(captured)


def kernels_of(captured):
    return [one for one in captured.program.launches if isinstance(one.callee, TritonKernel)]


def assert_as_eager(captured, function, *inputs):
    """On three lots of inputs of the same shapes."""
    with captured.load(device=backend()) as run:
        for factor in (1, 2, 3):
            given = [one * factor for one in inputs]
            expected = function(*(one.clone() for one in given))
            found = run(*(one.to("cuda") for one in given))
            torch.testing.assert_close(found.to("cpu"), expected)


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton_op("offload_tests::add", mutates_args={})
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = out.numel()
    wrap_triton(add_kernel)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, 16)
    return out


@triton.jit
def scale_kernel(x, out, n, factor, shift, twice, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < n) * factor + shift
    if twice > 5:
        y = y * 2
    tl.store(out + at, y, mask=at < n)


def scaled(x, factor, shift, *, twice=0, **options):
    out = torch.empty_like(x)
    n = x.numel()
    scale_kernel[(triton.cdiv(n, 32), 1)](x, out, n, factor, shift, twice, BLOCK=32, **options)
    return out
