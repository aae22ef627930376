"""Operators: several results, lists of tensors, no elements, each dtype, custom and fused ones."""

from __future__ import annotations

import warnings

import pytest
import torch
from checks import Call, capture, check, normal, normals
from torch import nn


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.topk(x, 2),
        lambda x: torch.sort(x, dim=0, descending=True),
        torch.std_mean,
        lambda x: torch.split(x * 2, 2),
        lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
        lambda x: torch.broadcast_tensors(x[:1], x),
        lambda x: torch._foreach_add([x, x[0]], 2.0),
        lambda x: torch._foreach_norm([x, x[0]]),
        torch.aminmax,
        lambda x: [y * 2 for y in x.unbind(0)],
        lambda x: torch.cat([x, x * 2, x[:0]], dim=0),
        lambda x: torch.stack(x.unbind(1)),
        torch.frexp,
        lambda x: torch.unsafe_split(x * 3, 2),
        lambda x: torch.nn.utils.vector_to_parameters(x[0], [x[1]]),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.block_diag(x, x),
        lambda x: torch.atleast_3d(x[0], x),
    ],
    ids=lambda function: None,
)
def test_several_results_and_tensor_lists(function):
    check(function, *normals(2, 4, 4), shares=False)


@torch.no_grad()
def test_lists_that_an_operator_writes_into_stay_as_recorded():
    """`_unsafe_masked_index` puts clamped indices into its argument list."""
    x, mask = torch.randn(8), torch.arange(8) != 2

    def function(x, mask, index):
        return torch.ops.aten._unsafe_masked_index(x, mask, [index], 0.0)

    captured = capture(function, x, mask, torch.arange(8))
    for fuse in (False, True):
        run = captured.load(fuse=fuse)
        for index in (torch.arange(8), torch.full((8,), 3), torch.full((8,), 1 << 40)):
            assert torch.equal(run(x, mask, index), function(x, mask, index))


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (), (1,)])
def test_zero_size_and_zero_dimensions(shape):
    def function(x):
        y = x * 2 + 1
        return y, y.sum(), y.clone(), y.reshape(-1), torch.cat([y.reshape(-1), x.reshape(-1)])

    check(function, *normals(2, *shape))
    check(lambda x: x.add_(1), *normals(2, *shape))


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def values_of(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(3, 4) > 0.5
    if dtype in INTEGERS:
        return torch.randint(0, 50, (3, 4)).to(dtype)
    return torch.randn(3, 4, dtype=torch.complex128 if dtype.is_complex else None).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS, *COMPLEX], ids=str)
def test_dtypes(dtype):
    def function(x):
        if dtype is torch.bool:
            return x & x.t().reshape(3, 4), ~x, x.float(), x.sum(), x.clone()
        y = x * 3 + x
        y.add_(x)
        return y, y.t(), y.clone(), y.sum(0), y.to(torch.complex64), y == x, y.reshape(-1)[::2]

    check(function, *(Call(values_of(dtype)) for _ in range(3)))


@pytest.mark.parametrize(
    "dtype", [torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64]
)
def test_dtypes_that_only_move(dtype):
    def function(x):
        y = x.clone()
        return y, y.t(), x[1:].clone(), torch.cat([x, y])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of them are experimental
        source = torch.randint(0, 200, (3, 4)).to(dtype)
        captured = capture(function, source)
        other = torch.randint(0, 200, (3, 4)).to(dtype)
        expected = function(other.clone())
        for got, one in zip(captured(other), expected, strict=True):
            assert (got.dtype, got.shape) == (one.dtype, one.shape)
            own, theirs = got.contiguous(), one.contiguous()
            assert torch.equal(own.view(torch.uint8), theirs.view(torch.uint8))


def test_conjugate_and_negative_bits():
    def function(x):
        conjugate = x.conj()
        imaginary = conjugate.imag
        return conjugate, imaginary, conjugate @ x.t(), imaginary * 2, conjugate + 1, x.mH @ x

    def call():
        return Call(torch.randn(3, 3, dtype=torch.complex64))

    check(function, call(), call())


@torch.library.custom_op("offload_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("offload_tests::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1)


def test_custom_operators():
    """Operators of a library written in Python run as one launch."""

    def function(x):
        y = x * 1
        torch.ops.offload_tests.bump(y)
        torch.ops.offload_tests.bump(x)
        return torch.ops.offload_tests.twice(y)

    run = check(function, *normals(3, 4))
    assert "offload_tests::twice" in str(run.program)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first):
    """Its fast path in evaluation uses fused operators."""
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    check(model, *normals(3, 2, 5, 8), tolerance=1e-5)
    masks = [torch.arange(5).expand(2, 5) >= torch.tensor([[5], [k]]) for k in (3, 2, 5)]
    calls = [Call(normal(2, 5, 8), src_key_padding_mask=mask) for mask in masks]
    check(model, *calls, tolerance=1e-5)
