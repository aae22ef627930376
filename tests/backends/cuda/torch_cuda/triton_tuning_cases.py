"""Triton kernels of several configurations, timed at the recording.

Run by `test_cuda_triton_kernels`, as `triton_cases`. Times are given, not measured. No GPU has
run this.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

from cases import cuda, settled  # noqa: F401
from triton.runtime.errors import OutOfResources
from triton_checks import assert_as_eager, captured_of, kernels_of, launched  # noqa: F401

import offload


def timed(call, quantiles):
    call()
    return [float(timed.times.pop(0))] * 3


@triton.autotune(
    [
        triton.Config({"BLOCK": size}, num_warps=warps)
        for size, warps in ((16, 1), (32, 2), (64, 8))
    ],
    key=["n"],
    do_bench=timed,
    reset_to_zero=["out"],
)
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(out + at, mask=at < n) + tl.load(x + at, mask=at < n), mask=at < n)


def test_the_tuned_configuration_is_kept():
    """Measured on copies: `out` is read and written, and no measurement is recorded."""
    timed.times = [3, 1, 2]

    def model(x):
        out = x * 2
        tuned_kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, out, 64)
        return out

    captured = captured_of(model, torch.randn(64))
    assert [one.name for one in captured.program.launches] == [
        "aten::mul.Tensor",
        "triton::tuned_kernel",
    ]
    (launch,) = kernels_of(captured)
    assert dict(launch.callee.constants) == {"BLOCK": 32, "EVEN": True}
    assert dict(launch.callee.options)["num_warps"] == 2
    assert launch.callee.grid == (2, 1, 1)
    code = captured.bound.bindings.triton[launch.callee].compiled
    assert code.n_threads == 64
    assert_as_eager(captured, model, torch.randn(64))


def tuned(x, n=64):
    out = x * 2
    tuned_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


@pytest.fixture(autouse=True)
def untuned():
    """Nothing was timed before."""
    for kernel in (tuned_kernel, hooked_kernel):
        kernel.cache.clear()
    timed.times = []


def test_the_configuration_that_was_timed_before_is_kept():
    """By an eager call; the recording times nothing."""
    timed.times = [3, 2, 1]
    tuned(torch.randn(64))
    assert not timed.times
    (launch,) = kernels_of(captured_of(tuned, torch.randn(64)))
    assert dict(launch.callee.constants)["BLOCK"] == 64
    assert dict(launch.callee.options)["num_warps"] == 8


def test_a_saved_configuration_is_not_timed_again(tmp_path):
    """Wherever it is opened the kernel is compiled in the configuration of the file."""
    timed.times = [3, 1, 2]
    captured = captured_of(tuned, torch.randn(64))
    captured.save(tmp_path / "model.offload")
    tuned_kernel.cache.clear()
    again = offload.open(tmp_path / "model.offload", triton=True)
    assert again.program.launches == captured.program.launches
    timed.times = [1, 2, 3]
    tuned(torch.randn(64))  # Triton resets `out` in the eager call that times
    assert_as_eager(again, tuned, torch.randn(64))
    assert not timed.times
    (launch,) = kernels_of(again)
    assert dict(launch.callee.constants)["BLOCK"] == 32


def test_a_configuration_for_each_recording():
    """Sizes are among what Triton times for."""
    chosen = []
    for times, n in (([1, 2, 3], 64), ([3, 2, 1], 128)):
        timed.times = times
        captured = captured_of(lambda x, n=n: tuned(x, n), torch.randn(n))
        chosen += [dict(one.callee.constants)["BLOCK"] for one in kernels_of(captured)]
        assert_as_eager(captured, lambda x, n=n: tuned(x, n), torch.randn(n))
    assert chosen == [16, 64]


def test_a_configuration_that_does_not_fit_is_not_chosen(monkeypatch):
    def fits(call, quantiles):
        time = timed.times.pop(0)
        if time is None:
            raise OutOfResources(1 << 20, 1 << 10, "shared memory")
        return [float(time)] * 3

    monkeypatch.setattr(tuned_kernel, "_do_bench", fits)
    monkeypatch.setitem(vars(tuned_kernel), "do_bench", fits)
    timed.times = [5, None, 4]
    (launch,) = kernels_of(captured_of(tuned, torch.randn(64)))
    assert dict(launch.callee.constants)["BLOCK"] == 64


def empty_first(given):
    given["out"].zero_()


@triton.autotune(
    [triton.Config({"BLOCK": size}, pre_hook=empty_first) for size in (16, 32)],
    key=["n"],
    do_bench=timed,
)
@triton.jit
def hooked_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(out + at, mask=at < n) + tl.load(x + at, mask=at < n), mask=at < n)


def hooked(x):
    out = x * 2
    hooked_kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, out, 64)
    return out


def test_what_the_configuration_does_first_is_recorded():
    timed.times = [2, 1]
    captured = captured_of(hooked, torch.randn(64))
    assert [one.name for one in captured.program.launches] == [
        "aten::mul.Tensor",
        "aten::zero_",
        "triton::hooked_kernel",
    ]
    assert_as_eager(captured, hooked, torch.randn(64))
