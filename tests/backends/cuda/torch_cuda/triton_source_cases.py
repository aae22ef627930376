"""Sources of a model's own Triton kernels, and their compilation.

Run by `test_cuda_triton_kernels`, as `triton_cases`. No GPU has run this.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

from cases import backend, cuda, on_cuda, settled  # noqa: F401
from triton_checks import (
    add,
    assert_as_eager,
    captured_of,
    kernels_of,
    launched,  # noqa: F401
    scaled,
)

import offload
from offload.backends.dispatched import DispatchBackend
from offload.errors import BackendUnavailable, CaptureError, FileError
from offload.program import Pointer

FACTOR = tl.constexpr(3)
OFFSET: tl.constexpr = 0.5  # not a constexpr, so Triton refuses it


@triton.jit
def helper(x):
    return x * FACTOR


renamed = helper


@triton.jit(noinline=True)
def apart(n):
    return n * 2


@triton.jit
def outer(x):
    return renamed(x) + helper(x) + apart(tl.program_id(0) + 1)


@triton.jit
def nested_kernel(x, out, BLOCK: tl.constexpr = 16):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, outer(tl.load(x + at)) + math.pi + tl.math.abs(tl.load(x + at)))


def nested(x):
    out = torch.empty_like(x)
    nested_kernel[(1,)](x, out)
    return out


def test_what_a_kernel_uses_is_part_of_its_source(monkeypatch):
    captured = captured_of(nested, torch.randn(16))
    (launch,) = kernels_of(captured)
    assert "FACTOR = _tl.constexpr(3)" in launch.callee.source
    assert "noinline=True" in launch.callee.source
    x = torch.randn(16)
    expected = nested(x)
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(5))
    with captured.load(device=backend()) as run:
        torch.testing.assert_close(run(x.to("cuda")).to("cpu"), expected)


def kernel_of_one_name(number):
    # Triton finds constants of an enclosing function.
    if number == 1:

        @triton.jit
        def same_name(x, out, BLOCK: tl.constexpr):
            tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) + 1)

    else:

        @triton.jit
        def same_name(x, out, BLOCK: tl.constexpr):
            tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) * 2)

    return same_name


def test_two_kernels_of_one_name():
    kernels = [kernel_of_one_name(number) for number in (1, 2)]

    def model(x):
        for kernel in (*kernels, kernels[0]):
            out = torch.empty_like(x)
            kernel[(1,)](x, out, 8)
            x = out
        return x

    captured = captured_of(model, torch.randn(8))
    assert len({one.callee for one in kernels_of(captured)}) == 2
    assert_as_eager(captured, model, torch.randn(8))


def other_helper_kernel():
    def helper(x):
        return x - 1

    helper = triton.jit(helper)

    @triton.jit
    def mixed_kernel(x, out, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, helper(tl.load(x + at)) + outer(tl.load(x + at)))

    return mixed_kernel


def test_two_helpers_of_one_name_are_refused():
    """One module cannot hold both."""
    kernel = other_helper_kernel()

    def model(x):
        out = torch.empty_like(x)
        kernel[(1,)](x, out, 8)
        return out

    with pytest.raises(CaptureError, match="helper stands for different things"):
        captured_of(model, torch.randn(8))


def test_options_are_given_to_the_compiler():
    captured = captured_of(lambda x: scaled(x, 2.0, 3, num_warps=2), torch.randn(64))
    (launch,) = kernels_of(captured)
    assert launch.callee.options == (("num_warps", 2),)
    assert captured.bound.bindings.triton[launch.callee].compiled.n_threads == 64


@triton.jit
def product_kernel(a, b, out, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    at, deep = tl.arange(0, SIZE), tl.arange(0, DEPTH)
    left = tl.load(a + at[:, None] * DEPTH + deep[None, :])
    right = tl.load(b + deep[:, None] * SIZE + at[None, :])
    tl.store(out + at[:, None] * SIZE + at[None, :], tl.dot(left, right))


def test_much_shared_memory(cuda):  # noqa: F811
    """The driver gives more than 48 KiB to a function that asks for it before."""

    def model(a, b):
        out = torch.empty(128, 128)
        product_kernel[(1,)](a, b, out, 128, 128)
        return out

    a, b = torch.randn(128, 128).half(), torch.randn(128, 128).half()
    captured = captured_of(model, a, b)
    (launch,) = kernels_of(captured)
    assert captured.bound.bindings.triton[launch.callee].compiled.shared_bytes > 48 << 10
    before = cuda.simulator.calls("cuFuncSetAttribute")
    with captured.load(device=backend()) as run:
        found = run(a.to("cuda"), b.to("cuda"))
        torch.testing.assert_close(found.to("cpu"), model(a, b), rtol=1e-3, atol=1e-3)
    assert cuda.simulator.calls("cuFuncSetAttribute") == before + 1


def test_other_devices_run_no_triton_kernels():
    x, y = torch.randn(40), torch.randn(40)
    with offload.capture(add) as captured:
        captured(x, y)
    with pytest.raises(BackendUnavailable, match="is a Triton kernel"):
        captured.load()
    host = DispatchBackend("cuda", lambda _: None)
    with pytest.raises(CaptureError, match="scheduling='host'"):
        host.prepare(on_cuda(captured).bound)


def test_save_and_open(tmp_path, launched):  # noqa: F811
    """A file has the source; who opens it must agree to that."""
    x, y = torch.randn(40), torch.randn(40)
    captured = captured_of(lambda x, y: add(x, y).relu(), x, y)
    path = tmp_path / "model.offload"
    captured.save(path)
    with pytest.raises(FileError, match=r"source of 1 Triton kernel.*triton=True"):
        offload.open(path)
    again = offload.open(path, triton=True)
    assert again.program.launches == captured.program.launches
    assert not again.bound.bindings.triton
    launched.names.clear()
    assert_as_eager(again, lambda x, y: add(x, y).relu(), x, y)
    assert "add_kernel" in launched.names


elsewhere = ThreadPoolExecutor(1)


def test_a_kernel_on_another_thread_is_left_alone():
    def model(x):
        elsewhere.submit(add, torch.ones(40), torch.ones(40)).result()
        return add(x, x)

    captured = captured_of(model, torch.randn(40))
    assert len(kernels_of(captured)) == 1
    assert_as_eager(captured, lambda x: add(x, x), torch.randn(40))


def test_triton_is_as_before_after_a_recording():
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction

    before = vars(InterpretedFunction)["run"], vars(Autotuner)["run"], vars(Autotuner)["_bench"]
    captured_of(add, torch.randn(4), torch.randn(4))

    def broken(x):
        add(x, x)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        captured_of(broken, torch.randn(4))
    after = vars(InterpretedFunction)["run"], vars(Autotuner)["run"], vars(Autotuner)["_bench"]
    assert after == before


def test_pointers_of_one_launch_are_words(cuda):  # noqa: F811
    captured = captured_of(lambda x: scaled(x, 2.0, 3), torch.randn(64))
    prepared = backend().prepare(captured.bound)
    (node,) = prepared.state.capture.nodes
    (launch,) = kernels_of(captured)
    call = launch.callee.call(launch, captured.bound.bindings.triton[launch.callee].compiled)
    assert len(node.declared) == sum(isinstance(one, Pointer) for one in call.parameters) == 2
    words = [one.value for one in prepared.state.discovery.words]
    assert words == [view.value for view in launch.views()]
