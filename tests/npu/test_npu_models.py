"""Small models on torch_npu and the simulated NPU, eager and replayed, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from on_npu import capture, check_same
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_eager(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().eval().to(dtype)
    x = torch.randn(2, 5, 16, dtype=dtype)
    tolerance = 3e-2 if dtype is torch.bfloat16 else None
    check_same(copy.deepcopy(model).npu()(x.npu()), model(x), tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_replay_follows_inputs(name: str) -> None:
    model = MODELS[name]().eval()
    static = torch.randn(2, 5, 16).npu()
    graph, result = capture(copy.deepcopy(model).npu(), static)
    for _ in range(3):
        x = torch.randn(2, 5, 16)
        static.copy_(x)
        graph.replay()
        check_same(result, model(x))


def test_replay_follows_weights() -> None:
    model = MODELS["mlp"]().eval()
    on_device = copy.deepcopy(model).npu()
    x = torch.randn(3, 16)
    graph, result = capture(on_device, x.npu())
    for weight in (model[0].weight, on_device[0].weight):
        weight.mul_(-0.5)
    graph.replay()
    check_same(result, model(x))
