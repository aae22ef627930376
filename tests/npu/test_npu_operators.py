"""Operators that torch_npu runs, eager and replayed, against the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from on_npu import capture, check_same, to_npu

SIMULATORS = Path(__file__).parents[1] / "simulators" / "ascend"


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ids(*shape: int, below: int = 6) -> torch.Tensor:
    return torch.randint(0, below, shape)


Case = tuple[Callable[..., torch.Tensor], tuple[Callable[[], torch.Tensor], ...]]


def case(function: Callable[..., torch.Tensor], *inputs: Callable[[], torch.Tensor]) -> Case:
    return function, inputs


def matrix() -> torch.Tensor:
    return floats(4, 6)


def vector() -> torch.Tensor:
    return floats(6)


def batch() -> torch.Tensor:
    return floats(3, 4, 6)


def heads() -> torch.Tensor:
    return floats(2, 2, 5, 8)


def numbers() -> torch.Tensor:
    return ids(4, 6)


def constant(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=device)


POINTWISE = {
    "add": case(lambda a, b: a + b, matrix, matrix),
    "add broadcast": case(lambda a, b: a + b, matrix, vector),
    "add scaled": case(lambda a, b: torch.add(a, b, alpha=2), matrix, vector),
    "add number": case(lambda a: a + 1.5, matrix),
    "add views": case(lambda a, b: a.t()[1:, ::2] + b.t()[1:, ::2], matrix, matrix),
    "number minus": case(lambda a: 2 - a, matrix),
    "subtract": case(lambda a, b: a - b, matrix, vector),
    "multiply": case(lambda a, b: a * b, matrix, vector),
    "multiply number": case(lambda a: a * 3, matrix),
    "divide": case(lambda a, b: a / (b.abs() + 1), matrix, matrix),
    "divide number": case(lambda a: a / 3, matrix),
    "reciprocal": case(lambda a: 1 / (a.abs() + 1), matrix),
    "power": case(lambda a: a**2, matrix),
    "power of fraction": case(lambda a: a.abs() ** 1.5, matrix),
    "maximum": case(torch.maximum, matrix, matrix),
    "minimum": case(torch.minimum, matrix, matrix),
    "clamp": case(lambda a: a.clamp(-0.5, 0.5), matrix),
    "clamp below": case(lambda a: a.clamp_min(0.1), matrix),
    "where": case(lambda a, b: torch.where(a > 0, a, b), matrix, matrix),
    "masked fill": case(lambda a: a.masked_fill(a > 0, -1.0), matrix),
    "compare": case(lambda a, b: a <= b, matrix, matrix),
    "compare numbers": case(lambda a: a > 2.5, numbers),
    "equal": case(lambda a, b: a == b, numbers, numbers),
    "logic": case(lambda a: ~((a > 0) & (a < 1)), matrix),
    "in place": case(lambda a: a.clone().add_(1).mul_(2).sub_(0.5).div_(3).relu_(), matrix),
    "integers": case(lambda a: a * 2 + 1, numbers),
    "integers of 32 bits": case(lambda a: a.int() - 3, numbers),
    "integers divided": case(lambda a: a / 2, numbers),
    "integers' remainder": case(lambda a: (a - 3) % 4, numbers),
    "to half": case(lambda a: a.half() + 1, matrix),
    "to bfloat16": case(lambda a: a.bfloat16() * 2, matrix),
    "to long": case(lambda a: (a * 3).long(), matrix),
    "to bool": case(lambda a: a.bool(), numbers),
    "gelu": case(F.gelu, matrix),
    "silu": case(F.silu, matrix),
    **{
        name: case(lambda a, name=name: getattr(torch, name)(a.abs() + 0.1), matrix)
        for name in (
            *("abs", "ceil", "cos", "erf", "exp", "floor", "isfinite", "log", "neg"),
            *("reciprocal", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "tanh"),
        )
    },
}

OTHERS = {
    "softmax": case(lambda a: F.softmax(a, -1), matrix),
    "softmax of columns": case(lambda a: F.softmax(a, 0), matrix),
    "log softmax": case(lambda a: F.log_softmax(a, -1), matrix),
    "layer norm": case(lambda a, w, b: F.layer_norm(a, (6,), w, b), batch, vector, vector),
    "layer norm of two": case(lambda a: F.layer_norm(a, (4, 6)), batch),
    "mm": case(lambda a, b: a @ b.t(), matrix, matrix),
    "mv": case(lambda a, b: a @ b, matrix, vector),
    "dot": case(torch.dot, vector, vector),
    "bmm": case(lambda a: a @ a.transpose(1, 2), batch),
    "matmul broadcast": case(lambda a, b: a @ b.t(), batch, matrix),
    "linear": case(F.linear, matrix, lambda: floats(5, 6), lambda: floats(5)),
    "linear of batch": case(F.linear, batch, lambda: floats(5, 6), lambda: floats(5)),
    "addmm": case(
        lambda a, b, c: torch.addmm(c, a, b.t(), beta=0.5, alpha=2),
        matrix,
        matrix,
        lambda: floats(4, 4),
    ),
    "baddbmm": case(
        lambda a, c: torch.baddbmm(c, a, a.transpose(1, 2), alpha=0.5),
        batch,
        lambda: floats(3, 4, 4),
    ),
    "attention": case(lambda q: F.scaled_dot_product_attention(q, q, q), heads),
    "causal attention": case(
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), heads
    ),
    "masked attention": case(
        lambda q, k: F.scaled_dot_product_attention(
            q, k, k, attn_mask=torch.ones(5, 5, dtype=torch.bool, device=q.device).tril()
        ),
        heads,
        heads,
    ),
    "sum": case(lambda a: a.sum(), matrix),
    "sum of rows": case(lambda a: a.sum(1, keepdim=True), batch),
    "sum of integers": case(lambda a: a.sum(), numbers),
    "mean": case(lambda a: a.mean(-1), matrix),
    "variance": case(lambda a: a.var(1), matrix),
    "largest": case(lambda a: a.max(), matrix),
    "largest of rows": case(lambda a: a.amax(1), matrix),
    "place of largest": case(lambda a: a.argmax(1), matrix),
    "largest and place": case(lambda a: a.max(1)[0] + a.min(1)[1], matrix),
    "any": case(lambda a: (a > 0).any(), matrix),
    "all": case(lambda a: (a > -9).all(1), matrix),
    "cumulative sum": case(lambda a: a.cumsum(1), matrix),
    "cat": case(lambda a, b: torch.cat([a, b], 1), matrix, matrix),
    "stack": case(lambda a, b: torch.stack([a, b], 1), matrix, matrix),
    "embedding": case(lambda w, i: F.embedding(i, w), matrix, lambda: ids(2, 3, below=4)),
    "index": case(lambda a: a[constant(a.device, 2, 0)], matrix),
    "index select": case(lambda a: a.index_select(1, constant(a.device, 2, 0)), matrix),
    "gather": case(lambda a, i: a.gather(1, i), matrix, numbers),
    "flip": case(lambda a: a.flip(0), matrix),
    "repeat": case(lambda a: a.repeat(2, 2), matrix),
    "contiguous": case(lambda a: a.permute(2, 0, 1).contiguous(), batch),
    "expand": case(lambda a: a[:, None].expand(4, 3, 6).contiguous(), matrix),
    "tril": case(lambda a: a.tril(), matrix),
    "triu": case(lambda a: a.triu(1), matrix),
    "arange": case(lambda a: a + torch.arange(6, device=a.device), matrix),
    "full": case(lambda a: a + torch.full((6,), 2.5, device=a.device), matrix),
    "ones": case(lambda a: a * torch.ones(6, device=a.device), matrix),
    "zeros": case(lambda a: a * torch.zeros(6, device=a.device), matrix),
    "eye": case(lambda a: a + torch.eye(4, 6, device=a.device), matrix),
}
CASES = {**POINTWISE, **OTHERS}
# These copy their indices from the host, which a capture does not support.
NOT_CAPTURED = {"index", "index select"}


@pytest.mark.parametrize("name", CASES)
def test_eager(name: str) -> None:
    function, make_inputs = CASES[name]
    inputs = [make() for make in make_inputs]
    check_same(function(*to_npu(inputs)), function(*inputs))


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_CAPTURED])
def test_replay_follows_inputs(name: str) -> None:
    function, make_inputs = CASES[name]
    inputs = to_npu([make() for make in make_inputs])
    graph, result = capture(function, *inputs)
    for _ in range(2):
        changed = [make() for make in make_inputs]
        for static, new in zip(inputs, changed, strict=True):
            static.copy_(new)
        graph.replay()
        check_same(result, function(*changed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["add views", "gelu", "softmax", "layer norm", "linear", "cat"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    function, make_inputs = CASES[name]
    inputs = [make().to(dtype) for make in make_inputs]
    check_same(function(*to_npu(inputs)), function(*inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_converts_every_value(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    wide = every.float()
    assert torch.equal(every.npu().float().cpu().nan_to_num(), wide.nan_to_num())
    bits = wide[wide.isfinite()].view(torch.int32)
    step = 1 << (13 if dtype is torch.float16 else 16)  # between adjacent normal numbers
    between = [bits + part for part in (0, step // 2 - 1, step // 2, step // 2 + 1)]
    tiny = torch.linspace(-1e-7, 1e-7, 999).view(torch.int32)
    values = torch.cat([*between, tiny]).view(torch.float32)
    assert torch.equal(
        values.npu().to(dtype).cpu().view(torch.int16), values.to(dtype).view(torch.int16)
    )


@pytest.mark.usefixtures("simulated_npu")
def test_gelu_by_tanh_is_the_same_operator() -> None:
    """torch_npu sends both kinds to aclnnGelu."""
    x = matrix()
    found = F.gelu(x.npu(), approximate="tanh")
    check_same(found, F.gelu(x))
    check_same(found, F.gelu(x, approximate="tanh"), tolerance=1e-3)


def test_selection_by_mask() -> None:
    x = matrix()
    check_same(x.npu()[x.npu() > 0], x[x > 0])
    check_same(torch.masked_select(x.npu(), x.npu() > 0), x[x > 0])


def test_addresses_are_gathered_bit_for_bit() -> None:
    """aclnnIndexSelect by 32-bit indices, and aclnnAdd into a given result, of 64-bit integers."""
    bases = torch.tensor([2**53 + 1, 2**62 + 3, 2**47 - 8, 0])
    index = torch.tensor([0, 1, 2, 3, 3, 3, 2, 1] * 5, dtype=torch.int32)
    offsets = torch.tensor([5, 2**61 + 1, 2**40 + 3, -1, -(2**63), 2**63 - 1, -16, 7] * 5)
    table = torch.zeros(40, dtype=torch.int64).npu()
    selected = torch.index_select(bases.npu(), 0, index.npu())
    torch.add(selected, offsets.npu(), out=table)
    assert torch.equal(table.cpu(), bases[index.long()] + offsets)


def test_whether_tensors_are_equal() -> None:
    x = floats(4, 6)
    assert torch.equal(x.npu(), x.npu())
    assert torch.equal(x.npu().t(), x.t().contiguous().npu())
    assert not torch.equal(x.npu(), (x + torch.eye(4, 6)).npu())
    big = torch.tensor([2**62, 5])
    assert not torch.equal(big.npu(), (big + 1).npu())


def test_empty_tensors() -> None:
    x = floats(0, 6)
    check_same(x.npu() + 1, x + 1)
    check_same(torch.cat([x.npu(), x.npu()], 1), torch.cat([x, x], 1))


def test_tensors_print() -> None:
    x = torch.tensor([1.0, -2.5])
    assert repr(x.npu()) == "tensor([ 1.0000, -2.5000], device='npu:0')"


# torch_npu's launching thread empties its queue before it notes a failure (Repository::ReadQueue in
# csrc/core/npu/NPUQueue.cpp): a synchronisation in between sees neither, a later one reports it.
REFUSED = """
import sys, time
sys.path.insert(0, {path!r})
import npu_device
npu_device.load()
import torch, torch_npu
torch.npu.set_compile_mode(jit_compile=False)
x = torch.ones(8, device="npu")
graph = torch.npu.NPUGraph()
try:
    with torch.npu.graph(graph):
        torch.topk(x, 2)
except RuntimeError as error:
    print("captured:", "aclop" in str(error))
try:
    torch.topk(x, 2)
    for _ in range(500):
        torch.npu.synchronize()
        time.sleep(0.01)
except RuntimeError as error:
    print("eager:", "TopKV2" in str(error))
"""


@pytest.mark.usefixtures("simulated_npu")
def test_operators_that_the_library_lacks_are_refused() -> None:
    """In a separate process: such a failure stops torch_npu's launching thread."""
    script = REFUSED.format(path=str(SIMULATORS))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert "captured: True\neager: True\n" in done.stdout, done.stderr
