"""Compiled kernels on a GPU: not run yet, as no GPU was available."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offload
from offload.program import Kernel

pytest.importorskip("triton", reason="triton compiles kernels for a GPU")


class Block(nn.Module):
    """A product of cuBLAS between regions of loops, one of them with several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(384, 384)
        self.norm = nn.LayerNorm(384)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(nn.functional.gelu(self.linear(x), approximate="tanh") + x)
        return y, (y.softmax(-1) * 2).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compute_what_the_model_does(dtype: torch.dtype) -> None:
    model = Block().eval().to("cuda", dtype)
    with torch.no_grad():
        captured = offload.capture(model, torch.randn(128, 384, device="cuda", dtype=dtype))
        with captured.load(fuse=True) as run:
            assert any(isinstance(one.callee, Kernel) for one in run.program.launches), (
                run.explain()
            )
            for _ in range(4):
                x = torch.randn(128, 384, device="cuda", dtype=dtype)
                torch.testing.assert_close(run(x), model(x))


def test_kernels_alone_need_one_capture() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y + 1).relu() - x.sigmoid()

    given = [torch.randn(1000, 999, device="cuda") for _ in range(2)]
    with offload.capture(model, *given).load(fuse=True) as run:
        assert "one capture was enough" in run.explain()
        for _ in range(3):
            x, y = (torch.randn(1000, 999, device="cuda") for _ in range(2))
            torch.testing.assert_close(run(x, y), model(x, y))
