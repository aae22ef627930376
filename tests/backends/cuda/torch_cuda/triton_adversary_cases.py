"""What an adversary tried with a model's own Triton kernels: run by `test_cuda_triton_kernels`.

As `triton_cases`. No GPU has run this.
"""

from __future__ import annotations

import json
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

from cases import backend, cuda, on_cuda, settled  # noqa: F401
from triton.language import cdiv as divided_up
from triton_checks import (
    add,
    add_kernel,
    assert_as_eager,
    captured_of,
    kernels_of,
    launched,  # noqa: F401
)

import offload
from offload.errors import CaptureError, FileError


@triton.jit
def constant_kernel(x, out, factor: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # An integer divides as an integer, a float as a float.
    tl.store(out + at, (tl.load(x + at) * 4 + 6) / (factor * 4))


def with_constants(x):
    outs = []
    for factor in (1, 1.0, True):
        out = torch.empty_like(x, dtype=torch.float32)
        constant_kernel[(1,)](x, out, factor, 8)
        outs.append(out)
    return torch.stack(outs)


def test_equal_constants_of_different_types_are_different_kernels():
    """In Python 1 == 1.0 == True."""
    captured = captured_of(with_constants, torch.arange(8))
    assert len({one.callee for one in kernels_of(captured)}) == 3
    assert len(captured.bound.bindings.triton) == 3
    assert_as_eager(captured, with_constants, torch.arange(8))


@triton.jit
def nowhere_kernel(x, out, factor: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at) * factor
    tl.store(out + at, value, mask=value != value)


def test_a_constant_that_is_no_number():
    """It does not equal itself, and a kernel with it is found all the same."""

    def model(x):
        out = torch.zeros_like(x)
        for _ in range(2):
            nowhere_kernel[(1,)](x, out, float("nan"), 8)
        return torch.isnan(out).float()

    captured = captured_of(model, torch.randn(8))
    assert len({one.callee for one in kernels_of(captured)}) == 1
    assert_as_eager(captured, model, torch.randn(8))


# ---- reads and writes --------------------------------------------------------------------------


@triton.jit
def counting_kernel(x, counts, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(counts + value, 1, mask=at < n)
    tl.atomic_max(total, tl.max(value, 0))


def test_atomics():
    def model(x):
        counts, total = torch.zeros_like(x[:8]), torch.zeros_like(x[:1])
        counting_kernel[(2,)](x, counts, total, 20, 16)
        return torch.cat([counts, total])

    captured = captured_of(model, torch.randint(0, 2, (20,), dtype=torch.int32))
    (launch,) = kernels_of(captured)
    assert len(launch.writes) == 2
    assert_as_eager(captured, model, torch.randint(0, 2, (20,), dtype=torch.int32))


@triton.jit
def silent_kernel(x, BLOCK: tl.constexpr):
    value = tl.load(x + tl.arange(0, BLOCK))
    tl.device_assert(tl.max(value, 0) < 1e30)


def test_a_kernel_that_writes_nothing():
    def model(x):
        silent_kernel[(1,)](x, 8)
        return x + 1

    captured = captured_of(model, torch.randn(8))
    assert_as_eager(captured, model, torch.randn(8))


def test_memory_that_two_arguments_share():
    """In place, across the halves of one tensor, and a result that is a view of an input."""

    def model(x):
        y = x * 2
        add_kernel[(1,)](y[:16], y[16:], y[:16], 16, 16)
        add_kernel[(1,)](y, y[8:], y[16:], 8, 16)
        add_kernel[(1,)](
            x.view(torch.int32)[:4], x.view(torch.int32)[4:], x[8:].view(torch.int32), 4, 16
        )
        return torch.cat([y, x])

    captured = captured_of(model, torch.arange(32.0))
    assert_as_eager(captured, model, torch.arange(32.0))


def test_a_wrapped_tensor_is_refused():
    """`triton.reinterpret` hides the tensor from torch."""

    def model(x):
        out = torch.zeros_like(x)
        wrapped = triton.reinterpret(out, tl.float32)
        add_kernel[(1,)](x, x, wrapped, 8, 16)
        return out

    with pytest.raises(CaptureError, match="add_kernel cannot be recorded"):
        captured_of(model, torch.randn(8))


def test_addresses_as_numbers_are_refused():
    def model(x):
        out = torch.zeros_like(x)
        add_kernel[(1,)](x, x, out.data_ptr(), 8, 16)
        return out

    with pytest.raises(CaptureError, match="data_ptr"):
        captured_of(model, torch.randn(8))


# ---- arguments and options ---------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "shift"], do_not_specialize_on_alignment=["x"])
def plain_kernel(
    x, out, n, shift, on, half: tl.float16, wide, BLOCK: tl.constexpr, num_stages: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < n) + shift + half
    if on:
        y += 1
    tl.store(out + at, y + (wide >> 40), mask=at < n)


def test_unspecialised_numbers_options_and_names():
    """A parameter has the name of an option, 1 is an argument, and NumPy gives a number."""

    def model(x):
        outs = [torch.empty_like(x) for _ in range(3)]
        plain_kernel[(1,)](x, outs[0], 16, 1, 1, 0.5, 1 << 41, 16, num_stages=2)
        plain_kernel[lambda meta: (meta["num_stages"] // 2,)](
            x, outs[1], n=16, shift=16, on=0, half=1.5, wide=-(1 << 41), BLOCK=16, num_stages=2
        )
        plain_kernel[(np.int64(1),)](
            x, outs[2], 16, np.float64(2.5), 0, 0.25, (1 << 63) + 5, 16, num_stages=2
        )
        return torch.stack(outs)

    captured = captured_of(model, torch.randn(16))
    first, *_ = kernels_of(captured)
    assert "n" not in first.callee.divisible
    assert "x" not in first.callee.divisible
    assert dict(first.callee.constants)["num_stages"] == 2
    assert_as_eager(captured, model, torch.randn(16))


EPSILON = tl.constexpr(1e-3)
DEFAULT_BLOCK = 16


@triton.jit
def library_kernel(x, out, n, BLOCK: tl.constexpr = DEFAULT_BLOCK):
    """Umlaut: ü."""
    at = tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < n, other=float("-inf"))
    y = tl.softmax(y) + tl.sigmoid(y) + EPSILON  # ä
    tl.store(out + at, y + divided_up(n, 4), mask=at < n)


def test_functions_of_tritons_own_library():
    def model(x):
        out = torch.empty_like(x)
        library_kernel[(1,)](x, out, 12)
        return out

    captured = captured_of(model, torch.randn(12))
    assert_as_eager(captured, model, torch.randn(12))


# ---- configurations ----------------------------------------------------------------------------


def first_of_two(configurations, named, **_):
    assert named["n"] == 16
    return [one for one in configurations if one.kwargs["BLOCK"] == 32]


def zeroed(named):
    named["out"].zero_()


@triton.autotune(
    [triton.Config({"BLOCK": size}, num_warps=1, pre_hook=zeroed) for size in (16, 32)],
    key=["n"],
    prune_configs_by={"early_config_prune": first_of_two},
    restore_value=["out"],
)
@triton.jit
def pruned_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(out + at, mask=mask) + tl.load(x + at, mask=mask), mask=mask)


def test_a_hook_of_a_configuration_is_recorded_and_restored_values_stay(monkeypatch):
    monkeypatch.setattr(pruned_kernel, "_do_bench", lambda call, **_: (call(), [1.0] * 3)[1])

    def model(x):
        out = x + 5
        pruned_kernel[(1,)](x, out, 16)
        return out

    captured = captured_of(model, torch.randn(16))
    assert [one.name for one in captured.program.launches][1:] == [
        "aten::zero_",
        "triton::pruned_kernel",
    ]
    assert_as_eager(captured, model, torch.randn(16))


# ---- around ------------------------------------------------------------------------------------


@triton_op("offload_adversary::twice", mutates_args={"y"})
def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wrap_triton(add_kernel)[(3,)](x, y, y, 40, 16)
    return add(x, y) * 2


def twice_again(x):
    y = x * 3
    return twice(x, y) + y


@torch.compile(backend="eager")
def compiled(x):
    return twice_again(x)


def test_operators_of_kernels_in_one_another_and_compiled():
    for function in (twice_again, compiled):
        captured = captured_of(function, torch.randn(40))
        assert len(kernels_of(captured)) == 2
        assert_as_eager(captured, twice_again, torch.randn(40))


def test_executions_on_many_threads():
    captured = captured_of(twice_again, torch.randn(40))
    wrong = []
    with captured.load(device=backend()) as run:

        def execute(seed):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(5):
                x = torch.randn(40, generator=generator)
                found = run(x.to("cuda")).to("cpu")
                if not torch.allclose(found, 14 * x):  # Triton's interpreter has one thread
                    wrong.append(seed)

        threads = [threading.Thread(target=execute, args=(seed,)) for seed in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert not wrong


def plain_launch(x, y):
    out = torch.empty_like(x)
    n = x.numel()
    add_kernel[(triton.cdiv(n, 16),)](x, y, out, n, 16)
    return out


@pytest.mark.parametrize("function", [add, plain_launch])
def test_sizes_that_vary_are_refused(function):
    dim = torch.export.Dim("n", min=2, max=64)
    with pytest.raises(CaptureError, match=r"Triton kernel \(triton::add_kernel\), whose grid"):
        offload.capture(
            function, torch.randn(40), torch.randn(40), dynamic_shapes=({0: dim}, {0: dim})
        )


# ---- files -------------------------------------------------------------------------------------


def changed(path, change):
    """A copy of a saved file in which a function has changed the kernel."""
    to = path.with_name("changed.offload")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("program.json"):
                document = json.loads(content)
                for launch in find(document, "triton"):
                    change(launch)
                content = json.dumps(document).encode()
            new.writestr(info, content)
    return to


def find(node, name):
    if isinstance(node, dict):
        if name in node:
            yield node
        for one in node.values():
            yield from find(one, name)
    elif isinstance(node, list):
        for one in node:
            yield from find(one, name)


def set_in(**values):
    return lambda node: node["triton"].update(values)


@pytest.fixture
def saved(tmp_path):
    captured = captured_of(add, torch.randn(40), torch.randn(40))
    captured.save(tmp_path / "model.offload")
    return tmp_path / "model.offload"


@pytest.mark.parametrize(
    "values",
    [
        {"function": "../add_kernel"},
        {"function": ""},
        {"function": 3},
        {"source": None},
        {"grid": [0, 1, 1]},
        {"grid": [1, 1]},
        {"signature": []},
        {"signature": [["x", "*fp32"], ["x", "*fp32"], ["out", "*fp32"], ["n", "i32"]]},
        {"signature": [["x", "i32"], ["y", "*fp32"], ["out", "*fp32"], ["n", "i32"]]},
        {"divisible": ["m"]},
    ],
)
def test_a_file_whose_kernel_is_none_is_refused(saved, values):
    with pytest.raises(FileError):
        offload.open(changed(saved, set_in(**values)), triton=True)


@pytest.mark.parametrize(
    "values",
    [
        {"source": "raise RuntimeError('no source')"},
        {"source": "import triton as _triton\n"},
        {"options": [["num_warps", 3]]},
    ],
)
def test_a_file_whose_kernel_does_not_compile_is_refused_at_load(saved, values):
    opened = offload.open(changed(saved, set_in(**values)), triton=True)
    with pytest.raises(CaptureError, match="add_kernel was not compiled"):
        opened.load(device=backend())
