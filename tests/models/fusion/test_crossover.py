"""The sizes from which products and attention stay as recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.compile import crossover
from offload.compile.toolchain import CompilerMissing, find_compiler

pytestmark = pytest.mark.slow

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(params=[True, False], ids=["tiles", "vectors"])
def has_tiles(request, monkeypatch):
    monkeypatch.setattr(crossover, "has_tiles", lambda: request.param)
    return request.param


def kept(model, *given):
    """Why launches stay as recorded; their results are near eager's."""
    with torch.no_grad():
        run = offload.capture(model, *given).load(fuse=True)
        torch.testing.assert_close(run(*given), model(*given), rtol=2e-2, atol=2e-2)
    return " ".join(why for _, why in run.fusion.kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 9])
def test_products(has_tiles, dtype, rows):
    is_kept = has_tiles and dtype == torch.bfloat16 and rows > 8
    linear = nn.Linear(16, 24).to(dtype).eval()
    assert ("more than 8 rows" in kept(linear, torch.randn(rows, 16, dtype=dtype))) == is_kept
    x, w = torch.randn(2, rows, 16, dtype=dtype), torch.randn(2, 16, 8, dtype=dtype)
    assert ("more than 8 rows" in kept(torch.bmm, x, w)) == is_kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [32, 33])
def test_attention(has_tiles, dtype, rows):
    is_kept = has_tiles and dtype == torch.bfloat16 and rows > 32
    q, k = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (rows, 32))
    found = kept(functional.scaled_dot_product_attention, q, k, k.clone())
    assert ("more than 1024 scores" in found) == is_kept


@pytest.mark.parametrize(("rows", "columns"), [(16, 300), (17, 256), (17, 257)])
def test_long_attention(rows, columns):
    q, k = (torch.randn(1, 2, n, 8) for n in (rows, columns))
    found = kept(functional.scaled_dot_product_attention, q, k, k.clone())
    assert ("computes in blocks" in found) == (rows > 16 and columns > 256)
