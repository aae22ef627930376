"""Indices of fused operators: refused where eager refuses, else with eager's values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.long]

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rows(index: torch.Tensor) -> torch.Tensor:
    return index[:, None].expand(3, 5)


OPERATORS: dict[str, Operator] = {
    "embedding": lambda x, i: functional.embedding(i, x) * 2,
    "gather": lambda x, i: x.gather(0, rows(i)) * 2,
    "index": lambda x, i: x[i] * 2,
    "index_add": lambda x, i: (x * 1).index_add(0, i, x[:3], alpha=2),
    "index_copy": lambda x, i: (x * 1).index_copy(0, i, x[:3]),
    "index_copy_": lambda x, i: (x * 1).index_copy_(0, i, x[:3]) + 1,
    "index_fill": lambda x, i: (x * 1).index_fill(0, i, 2.0),
    "index_put": lambda x, i: (x * 1).index_put((i,), x[:3]),
    "index_put_": lambda x, i: (x * 1).index_put_((i,), x[:3], accumulate=True) + 1,
    "index_select": lambda x, i: x.index_select(0, i) + 1,
    "index_select of columns": lambda x, i: x.index_select(1, i.int()) + 1,
    "put": lambda x, i: (x * 1).put(i, x[0, :3]),
    "scatter": lambda x, i: (x * 1).scatter(0, rows(i), x[:3]),
    "scatter_": lambda x, i: (x * 1).scatter_(0, rows(i), x[:3]) + 1,
    "scatter_add": lambda x, i: (x * 1).scatter_add(0, rows(i), x[:3]),
    "take": lambda x, i: x.take(i) + 1,
}


@torch.no_grad()
@pytest.mark.parametrize("name", OPERATORS)
def test_indices_that_eager_refuses_are_refused(name):
    operator, x = OPERATORS[name], torch.randn(6, 5)
    run = offload.capture(operator, x, torch.tensor([0, 2, 1])).load(fuse=True)
    assert run.fusion.n_kernels == 1
    assert not run.fusion.kept
    for given in ([0, 2, 1], [4, 3, 0], [0, 1, 100], [0, 1, -1], [-5, 1, 0], [3, -7, 1], [2, 1, 3]):
        index = torch.tensor(given)
        try:
            expected = operator(x, index)
        except (IndexError, RuntimeError):
            with pytest.raises(offload.ExecutionError, match="out of bounds"):
                run(x, index)
        else:
            torch.testing.assert_close(run(x, index), expected)
