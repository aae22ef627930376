"""The models of the benchmarks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def mlp16() -> tuple[nn.Module, torch.Tensor]:
    """16 x (Linear 64 to 64, ReLU), batch 1: 32 launches."""
    layers = [layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers).eval(), torch.randn(1, 64)


class Elementwise100(nn.Module):
    """50 x (sigmoid, relu) on 64 floats: 100 launches of next to no work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all of them."""
        for _ in range(50):
            x = torch.relu(torch.sigmoid(x))
        return x


def elementwise100() -> tuple[nn.Module, torch.Tensor]:
    """Elementwise100 and its input."""
    return Elementwise100().eval(), torch.randn(64)


class Block(nn.Module):
    """A GPT-style block: causal attention and a feed-forward of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x and the result [batch, tokens, width]."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def gpt_stack() -> tuple[nn.Module, torch.Tensor]:
    """6 GPT-style blocks of width 64 on 16 tokens."""
    return nn.Sequential(*(Block(64, 4) for _ in range(6))).eval(), torch.randn(1, 16, 64)
