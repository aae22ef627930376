"""Fused models on images, and what is asserted of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn

import offload


def trained(norm: nn.Module) -> nn.Module:
    """A batch norm with statistics as after training."""
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        if tensor is not None:
            nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.2, 3.0)
    return norm.eval()


def pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


class Together(nn.Module):
    """Several modules, each on a separate input: one program, so one compilation."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(modules)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [module(x) for module, x in zip(self.inside, inputs, strict=True)]


def fused(model: nn.Module, *inputs: torch.Tensor) -> offload.Executable:
    return offload.capture(model, *inputs).load(fuse=True)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
