"""A model with weights of all kinds, and the budgets under which weights are streamed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import offload
from offload.api import Captured


class Deep(nn.Module):
    """Layers of unequal sizes, one of them used twice, a buffer that is written."""

    def __init__(self, width: int = 128, n_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, (index % 3 + 1) * width),
                nn.ReLU(),
                nn.Linear((index % 3 + 1) * width, width),
            )
            for index in range(n_layers)
        )
        self.twice = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.twice(x)
        for layer in self.layers:
            x = self.norm(x + layer(x))
        return self.twice(x) + self.calls


class Headed(nn.Module):
    """Layers of one width, without biases, before one large weight, which sets the floor."""

    def __init__(self, width: int = 128, n_layers: int = 6, n_outputs: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n_layers))
        self.head = nn.Linear(width, n_outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


def weight_bytes(program: offload.Program) -> int:
    return sum(value.size_bytes for value in program.values if value.role == "weight")


def floor_of(captured: Captured) -> int:
    """The least budget, as the refusal of a smaller one says it."""
    with pytest.raises(offload.PlanError) as refused:
        captured.load(weights_budget=1)
    found = re.search(r"(\d+) bytes", str(refused.value))
    assert found is not None
    return int(found[1])


def budgets_of(captured: Captured) -> list[int]:
    """From the floor to all weights."""
    floor, whole = floor_of(captured), weight_bytes(captured.program)
    rest = max(0, whole - floor)  # none where all weights are too small to be streamed
    return [floor, *(floor + rest * part // 5 for part in range(1, 6)), floor + whole]
