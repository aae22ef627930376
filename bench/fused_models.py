"""The further models of the claim on fusion: each makes a module and the inputs of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from models import MODELS, Encoder, Tensors


def minilm128() -> tuple[nn.Module, Tensors]:
    """MiniLM on 128 tokens."""
    from offload.commands.demo.search import load_encoder

    model = load_encoder().model
    ids = torch.randint(1000, 20_000, (1, 128))
    return Encoder(model).eval(), (ids, torch.ones_like(ids), torch.zeros_like(ids))


class DecodeBlock(nn.Module):
    """A block of a decoder that takes one token, and its keys and values of fixed length."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Shapes: x [1, 1, width], position [1], keys and values [1, heads, length, head]."""
        length, width = keys.shape[2], x.shape[2]
        normed = self.norm_1(x)
        q, k, v = (
            layer(normed).view(1, 1, self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        at = torch.arange(length)
        is_now = (at == position).view(1, 1, length, 1)
        keys, values = torch.where(is_now, k, keys), torch.where(is_now, v, values)
        mask = torch.where(at <= position, 0.0, float("-inf")).view(1, 1, 1, length)
        attended = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(1, 1, width))
        normed = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """4 such blocks."""

    def __init__(self, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecodeBlock(width, heads) for _ in range(4))

    def forward(self, x: torch.Tensor, position: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """`cache` is [blocks, 2, 1, heads, length, head]; the result as x."""
        for block, held in zip(self.blocks, cache, strict=True):
            x = block(x, position, held[0], held[1])
        return x


def decoder() -> tuple[nn.Module, Tensors]:
    """A step of decoding: one token, 128 positions."""
    cache = torch.randn(4, 2, 1, 8, 128, 32)
    return Decoder().eval(), (torch.randn(1, 1, 256), torch.tensor([70]), cache)


class Recurrent(nn.Module):
    """32 steps of a GRU cell."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, steps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Shapes: steps [steps, batch, width]; state and the result [batch, width]."""
        for x in steps:
            state = self.cell(x, state)
        return state


def recurrent() -> tuple[nn.Module, Tensors]:
    """A GRU of 32 steps, 4 sequences."""
    return Recurrent().eval(), (torch.randn(32, 4, 128), torch.randn(4, 128))


class Experts(nn.Module):
    """A layer of 8 experts, all of which compute, weighted by the 2 largest of a softmax."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 8)
        self.up = nn.ModuleList(nn.Linear(width, inner) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(inner, width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x and the result [tokens, width]."""
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1)
        least = weights.topk(2).values[:, 1:]
        weights = torch.where(weights >= least, weights, 0.0)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            x = x + weights[:, number : number + 1] * down(functional.gelu(up(normed)))
        return x


def experts() -> tuple[nn.Module, Tensors]:
    """Two layers of experts, 16 tokens."""
    return nn.Sequential(Experts(128, 256), Experts(128, 256)).eval(), (torch.randn(16, 128),)


class Gated(nn.Module):
    """A gated feed-forward with a norm before and a residual around."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(width), nn.Linear(inner, width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x and the result [tokens, width]."""
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def gated() -> tuple[nn.Module, Tensors]:
    """8 gated feed-forwards, 8 tokens."""
    return nn.Sequential(*(Gated(192, 512) for _ in range(8))).eval(), (torch.randn(8, 192),)


class Recommender(nn.Module):
    """Embeddings and numbers, their products, and layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 19) for _ in range(7))
        self.bottom = nn.Sequential(nn.Linear(13, 51), nn.ReLU(), nn.Linear(51, 19), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(28 + 19, 97), nn.ReLU(), nn.Linear(97, 33), nn.ReLU(), nn.Linear(33, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(8, 8, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: numbers [batch, 13], ids [batch, 7]; the result [batch, 1]."""
        dense = self.bottom(numbers)
        looked_up = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        every = torch.stack([dense, *looked_up], 1)
        products = (every.unsqueeze(2) * every.unsqueeze(1)).sum(-1).flatten(1)
        first, second = self.pairs
        chosen = products.index_select(1, first * 8 + second)
        return torch.sigmoid(self.top(torch.cat([dense, chosen], 1)))


def recommender() -> tuple[nn.Module, Tensors]:
    """A recommender's head, batch 5."""
    return Recommender().eval(), (torch.randn(5, 13), torch.randint(1000, (5, 7)))


def bert_bf16() -> tuple[nn.Module, Tensors]:
    """MiniLM's encoder in bfloat16 on 32 tokens."""
    from offload.commands.demo.search import load_encoder

    model = load_encoder().model.to(torch.bfloat16)
    ids = torch.randint(1000, 20_000, (1, 32))
    return Encoder(model).eval(), (ids, torch.ones_like(ids), torch.zeros_like(ids))


FUSED_MODELS: Mapping[str, tuple[str, Callable[[], tuple[nn.Module, Tensors]]]] = {
    **MODELS,
    "minilm128": ("MiniLM, 128 tokens", minilm128),
    "decoder": ("a step of decoding, 4 blocks, 128 positions", decoder),
    "recurrent": ("a GRU of 32 steps, batch 4", recurrent),
    "experts": ("2 layers of 8 experts, 16 tokens", experts),
    "gated": ("8 gated feed-forwards, 8 tokens", gated),
    "recommender": ("a recommender's head, batch 5", recommender),
    "bert_bf16": ("MiniLM in bfloat16, 32 tokens", bert_bf16),
}
"""By name: the title in tables, and the function that makes it."""
