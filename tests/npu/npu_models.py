"""Small models of operators that the simulator has."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer block: attention and a feed-forward part, each behind a norm."""

    def __init__(self, n_features: int, n_heads: int, *, fused: bool) -> None:
        super().__init__()
        self.n_heads, self.fused = n_heads, fused
        self.norm_1, self.norm_2 = nn.LayerNorm(n_features), nn.LayerNorm(n_features)
        self.qkv = nn.Linear(n_features, 3 * n_features)
        self.project = nn.Linear(n_features, n_features)
        self.up, self.down = nn.Linear(n_features, 32), nn.Linear(32, n_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n_batches, n_tokens, n_features = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        query, key, value = (
            part.view(n_batches, n_tokens, self.n_heads, -1).transpose(1, 2) for part in parts
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
            mixed = F.softmax(scores, -1) @ value
        x = x + self.project(mixed.transpose(1, 2).reshape(n_batches, n_tokens, n_features))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)),
    "fused attention": lambda: Block(16, 2, fused=True),
    "attention by parts": lambda: Block(16, 2, fused=False),
    "two blocks": lambda: nn.Sequential(Block(16, 2, fused=False), Block(16, 4, fused=True)),
}


class Layers(nn.Module):
    """Layers of different sizes, so that several share places in the ring."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 64, 96, 64, 128, 64, 96, 64]
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
