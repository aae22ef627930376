"""A model's own Triton kernels on the simulated driver: run by `test_cuda_triton_kernels`.

As `kernel_cases`. The models are recorded on the CPU, where Triton interprets the kernels, as if
they were launched on the device. No GPU has run this.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

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
    scaled,
)

import offload
from offload.errors import CaptureError


def test_a_triton_op_is_its_launches(launched):  # noqa: F811
    def model(x, y):
        return add(x, y * 2) + 1

    x, y = torch.randn(40), torch.randn(40)
    captured = captured_of(model, x, y)
    names = [one.name for one in captured.program.launches]
    assert names == ["aten::mul.Tensor", "triton::add_kernel", "aten::add.Tensor"]
    (launch,) = kernels_of(captured)
    kernel = launch.callee
    assert kernel.grid == (3, 1, 1)
    assert kernel.constants == (("BLOCK", 16),)
    assert [kind for _, kind in kernel.parameters()] == ["*fp32", "*fp32", "*fp32", "i32"]
    first, second, made, n = launch.arguments
    assert n == 40
    assert launch.reads == tuple(sorted((first.value, second.value, made.value)))
    assert launch.writes == (made.value,)
    assert Path(launch.source.rpartition(":")[0]).name == "triton_checks.py"  # of the operator
    launched.names.clear()
    assert_as_eager(captured, model, x, y)
    assert launched.names[-3:] == ["add_kernel"] * 3


def test_kernels_alone_are_captured_once():
    x, y = torch.randn(40), torch.randn(40)
    captured = captured_of(add, x, y)
    assert len(captured.program.launches) == 1
    prepared = backend().prepare(captured.bound)
    (node,) = prepared.state.capture.nodes
    assert len(node.declared) == 3
    with captured.load(device=backend()) as run:
        assert "one capture was enough" in run.explain()
        arena = torch.empty(run.feature_map_bytes, dtype=torch.uint8, device="cuda")
        out = torch.empty(40, device="cuda")
        for _ in range(3):
            x, y = torch.randn(40), torch.randn(40)
            run(x.to("cuda"), y.to("cuda"), out=out, feature_map=arena)
            torch.testing.assert_close(out.to("cpu"), x + y)


def test_a_plain_launch_is_recorded():
    """Without an operator around it."""
    captured = captured_of(lambda x: scaled(x, 2.5, 1) * 3, torch.randn(50))
    assert [one.name for one in captured.program.launches] == [
        "triton::scale_kernel",
        "aten::mul.Tensor",
    ]
    assert_as_eager(captured, lambda x: scaled(x, 2.5, 1) * 3, torch.randn(50))


wrapped = wrap_triton(add_kernel)


def test_a_wrapped_launch_outside_of_an_operator_is_recorded():
    def model(x):
        out = torch.empty_like(x)
        for kernel in (wrapped, wrap_triton(add_kernel)):
            kernel[(3,)](x, x, out, 40, 16)
        return out

    captured = captured_of(model, torch.randn(40))
    assert len(kernels_of(captured)) == 2
    assert_as_eager(captured, model, torch.randn(40))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return add(x, x)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.contiguous()  # one element, expanded
        return add(gradient, gradient)


def test_kernels_of_a_backward_pass():
    weight = torch.nn.Parameter(torch.ones(40))
    weight.grad = torch.zeros(40)

    def step(x):
        weight.grad.zero_()
        loss = Doubled.apply(weight * x).sum()
        loss.backward()
        return loss.detach()

    captured = offload.capture(step, torch.randn(40), training=True)
    assert len(kernels_of(captured)) == 2


def test_numbers_are_those_of_each_launch():
    """Triton compiles 1 in, and that a number is a multiple of 16; floats are arguments."""

    def model(x):
        y = scaled(x, 0.1, 16)
        y = scaled(y, -3.25, 1, twice=7)
        return scaled(y, 1e30, -7) + scaled(x, float("nan"), 0).nan_to_num(2.0)

    captured = captured_of(model, torch.rand(48) + 1)
    launches = kernels_of(captured)
    assert [one.arguments[-3:] for one in launches[:2]] == [(0.1, 16, 0), (48, -3.25, 7)]
    assert "shift" in launches[0].callee.divisible
    assert dict(launches[1].callee.constants)["shift"] == 1
    assert_as_eager(captured, model, torch.rand(48) + 1)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.uint8]
)
def test_dtypes(dtype):
    def model(x):
        return add(x, x)

    captured = captured_of(model, torch.arange(20).to(dtype))
    assert_as_eager(captured, model, torch.arange(20).to(dtype))


@triton.jit
def strided_kernel(x, out, rows, step, columns: tl.constexpr):
    at = tl.arange(0, columns)
    row = tl.program_id(0)
    tl.store(out + row * columns + at, tl.load(x + row * step + at * rows) + 1)


def test_views_with_offsets_and_strides():
    """A view that begins at a multiple of 16 bytes is compiled for that, another is not."""

    def model(x):
        outs = torch.stack([x[:3], x[:3]])
        transposed = x.t()  # 8 x 4
        strided_kernel[(3,)](transposed[:, 1:].t(), outs[0], 1, 8, 8)
        strided_kernel[(3,)](x[0, 1:], outs[1], 1, 7, 8)
        return outs

    x = torch.randn(4, 8)
    captured = captured_of(model, x)
    first, second = kernels_of(captured)
    assert "x" in first.callee.divisible
    assert "x" not in second.callee.divisible
    assert_as_eager(captured, model, x)


@triton.jit
def bump_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


def test_kernels_that_write_what_they_read():
    """Inputs, weights and activations, the same tensor twice, and views that overlap."""
    weight = torch.ones(16)

    def model(x):
        y = x * 2
        bump_kernel[(1,)](y, y, 16, 16)
        bump_kernel[(1,)](y[4:], y[2:], 8, 8)
        bump_kernel[(1,)](weight, y, 16, 16)
        bump_kernel[(1,)](x, weight, 16, 16)
        return y + weight

    x = torch.randn(16)
    with offload.capture(model) as captured:
        captured(x.clone())
    weight.fill_(1)
    captured = on_cuda(captured)
    launches = kernels_of(captured)
    assert [len(one.writes) for one in launches] == [1] * 4
    (holders,) = captured.bound.bindings.weights.values()
    with captured.load(device=backend()) as run:
        for _ in range(3):
            x = torch.randn(16)
            on_device = x.to("cuda")
            found = run(on_device)
            expected = model(x)
            torch.testing.assert_close(found.to("cpu"), expected)
            torch.testing.assert_close(on_device.to("cpu"), x)
            torch.testing.assert_close(holders[0].to("cpu"), weight)


@triton.jit
def bias_kernel(x, bias, out, n, has_bias: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < n)
    if bias is not None:  # noqa: SIM102 - Triton evaluates both sides of `and`
        if has_bias:
            y += tl.load(bias + at, mask=at < n)
    tl.store(out + at, y, mask=at < n)


def test_none_and_tensors_without_elements():
    def model(x, bias):
        outs = [torch.empty_like(x) for _ in range(3)]
        bias_kernel[(1,)](x, bias, outs[0], 16, True, 16)
        bias_kernel[(1,)](x, None, outs[1], 16, True, 16)
        bias_kernel[(1,)](x, bias[:0], outs[2], 16, False, 16)
        bias_kernel[(0,)](x, bias, outs[2], 16, True, 16)  # Triton launches nothing
        empty = torch.empty(0)
        bias_kernel[(1,)](x, empty, outs[2], 16, False, 16)
        return torch.stack(outs)

    captured = captured_of(model, torch.randn(16), torch.randn(16))
    launches = kernels_of(captured)
    assert len(launches) == 4
    assert dict(launches[1].callee.constants)["bias"] is None
    assert_as_eager(captured, model, torch.randn(16), torch.randn(16))


@triton.jit
def typed_kernel(
    x, out, kind: tl.constexpr, to: tl.constexpr, factor: tl.constexpr, on: tl.constexpr,
    pair: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    y = tl.load(x + at).to(to)
    if kind == "relu" and on:
        y = tl.maximum(y, 0.0)
    tl.store(out + at, y.to(tl.float32) * factor + pair[0] - pair[1])


def test_constants_of_every_type(tmp_path):
    def model(x):
        outs = [torch.empty_like(x) for _ in range(3)]
        typed_kernel[(1,)](x, outs[0], "relu", tl.float16, 0.5, True, (1, 2.5), 16)
        typed_kernel[(1,)](x, outs[1], "no'ne", tl.bfloat16, float("inf"), False, (0, 0), 16)
        typed_kernel[(1,)](
            x, outs[2], kind="relu", to=tl.float32, factor=2, on=1, pair=(3, 4), BLOCK=16
        )
        return torch.stack(outs)

    captured = captured_of(model, torch.randn(16))
    assert_as_eager(captured, model, torch.randn(16))
    captured.save(tmp_path / "model.offload")
    again = offload.open(tmp_path / "model.offload", triton=True)
    assert [one.callee for one in again.program.launches] == [
        one.callee for one in captured.program.launches
    ]


def test_arguments_that_are_no_data_are_refused():
    def model(x):
        out = torch.empty_like(x)
        bias_kernel[(1,)](x, (x, x), out, 16, False, 16)
        return out

    with pytest.raises(CaptureError, match=r"bias_kernel cannot be recorded: .*custom_op"):
        captured_of(model, torch.randn(16))
