"""Models whose weights tests store in files, and the tensors in their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nets import ResNet18
from torch import nn
from torch.nn import functional


class Decoder(nn.Module):
    """An embedding that is also the head, attention with a mask, a buffer, a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.query = nn.Linear(32, 96, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.scale + torch.tensor([1.0, 2.0]).sum()
        heads = self.query(self.norm(hidden)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(attended.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last": self.layers(x), "first": x}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4), nn.Softmax(-1))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(3, 16)),
    "decoder": (Decoder, lambda: torch.randint(0, 50, (2, 7))),
    "encoder": (Encoder, lambda: torch.randn(2, 5, 32)),
    "resnet": (ResNet18, lambda: torch.randn(1, 3, 32, 32)),
}


def results(outcome: Any) -> list[torch.Tensor]:
    return list(outcome.values()) if isinstance(outcome, dict) else [outcome]
