"""A decoder as Llama's, with random weights in files, to be streamed to a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

WIDTH, HIDDEN, HEADS, N_LAYERS = 2048, 5632, 16, 16
DTYPE = torch.bfloat16


class Layer(nn.Module):
    """RMS norms, rotary attention without a mask tensor, a gated feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.feed_forward_norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward block."""
        normed = self.attention_norm(x)
        heads = [
            linear(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]
        query, key = (_rotated(one, cosine, sine) for one in heads[:2])
        attended = functional.scaled_dot_product_attention(query, key, heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Decoder(nn.Module):
    """Layers over hidden states; the angles of positions are inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """All layers; `x` [1, tokens, width], the angles [tokens, width of a head]."""
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.norm(x)


def build() -> Decoder:
    """The decoder on the default device."""
    return Decoder().to(DTYPE).eval()


def without_memory() -> Decoder:
    """The decoder on the meta device."""
    with torch.device("meta"):
        return build()


def save(folder: Path) -> None:
    """Write random weights, a file for each layer, never all in memory.

    Matrices are windows of one row of random numbers, at different offsets: drawing all would take
    longer than the measurement.
    """
    generator = torch.Generator().manual_seed(0)
    layers: dict[str, dict[str, torch.Size]] = {}
    for name, one in without_memory().state_dict().items():
        layers.setdefault(".".join(name.split(".")[:2]), {})[name] = one.shape
    shapes = [shape for layer in layers.values() for shape in layer.values()]
    numbers = torch.randn(max(map(math.prod, shapes)) + len(shapes), generator=generator)
    begin = 0
    for layer, named in layers.items():
        tensors = {}
        for name, shape in named.items():
            window = numbers[begin : begin + math.prod(shape)].view(shape) * shape[-1] ** -0.5
            tensors[name] = (window if len(shape) > 1 else torch.ones(shape)).to(DTYPE)
            begin += 1
        safetensors.torch.save_file(tensors, folder / f"{layer}.safetensors")


def inputs(n_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and the cosines and sines of positions."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, n_tokens, WIDTH, generator=generator)
    dimensions = torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)
    angles = torch.outer(torch.arange(n_tokens), 10_000.0**-dimensions).repeat(1, 2)
    return tuple(one.to(device, DTYPE) for one in (x, angles.cos(), angles.sin()))  # type: ignore[return-value]
