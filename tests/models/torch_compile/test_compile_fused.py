"""`torch.compile(model, backend="offload", options={"fuse": ...})` against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import normal
from compiling import compiled, n_captures, n_executions
from torch import nn

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("compiler_reset")


class Block(nn.Module):
    """A product, an activation and a norm around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x and the result [n, 24]."""
        return x + nn.functional.gelu(self.mix(self.norm(x)))


def runs_of(graphs: list[Any]) -> list[offload.Executable]:
    return [run for graph in graphs for run in graph._runs.values()]


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, "auto", False])
@torch.no_grad()
def test_kernels_take_the_place_of_launches(graphs, fuse):
    model = nn.Sequential(Block(), Block()).eval()
    run = compiled(model, options={"fuse": fuse})
    for _ in range(3):
        x = normal(5, 24)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert n_captures(graphs) == [1]
    assert n_executions(graphs) == 2
    (loaded,) = runs_of(graphs)
    assert (loaded.fusion is None) == (fuse is False)
    if loaded.fusion is not None:
        assert (loaded.fusion.choice is None) == (fuse is True)
        assert loaded.fusion.n_kernels > 0 or fuse == "auto"
        assert not [one.failure for one in loaded.fusion.proofs if one.failure]


@torch.no_grad()
def test_written_and_replaced_weights_are_seen(graphs):
    model = Block().eval()
    run = compiled(model, options={"fuse": True})
    x = normal(5, 24)
    for turn in range(6):
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
        if turn % 3 == 0:
            model.mix.weight.mul_(-2)
        elif turn % 3 == 1:
            model.mix.weight.data.add_(0.5)
        else:
            model.mix.bias.data = normal(24)
    (loaded,) = runs_of(graphs)
    assert loaded.fusion is not None
    assert loaded.fusion.n_kernels > 0


@pytest.mark.slow
@torch.no_grad()
def test_each_size_has_kernels_of_its_own(graphs):
    model = Block().eval()
    run = compiled(model, dynamic=True, options={"fuse": True})
    for n in (2, 7, 3, 7, 2):
        x = normal(n, 24)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert n_captures(graphs) == [3]
    for loaded in runs_of(graphs):
        assert loaded.fusion is not None
        assert loaded.fusion.n_kernels > 0
