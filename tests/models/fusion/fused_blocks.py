"""A transformer block to fuse, and what is asserted of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import offload


class Block(nn.Module):
    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 50), nn.Linear(50, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def block() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Block().eval(), torch.randn(2, 7, 24)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def modes(run: offload.Executable) -> set[str]:
    return {report.mode for report in run.launch_reports()}
