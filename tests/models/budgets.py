"""Models with weights of all kinds, and the budgets under which weights are streamed."""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
from torch import nn

import offload
from offload.api.captured import Captured
from offload.backends import Backend
from offload.load.budget import StreamedLoad
from offload.load.options import weight_streamer
from offload.load.place import place
from offload.timeline import Scheduling


class Deep(nn.Module):
    """Layers of unequal sizes, one of them used twice, and a buffer that is written."""

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


class Shared(nn.Module):
    """One block that all layers share, as ALBERT's: distant launches read its weights again."""

    def __init__(self, width: int = 128, n_layers: int = 4) -> None:
        super().__init__()
        self.n_layers = n_layers
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.n_layers):
            x = self.norm(x + torch.tanh(self.mix(x)))
            x = self.norm(x + self.narrow(torch.relu(self.wide(x))))
        return x


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


def floor_of(captured: Captured, device: str | None = None) -> int:
    """The least budget, as stated by the refusal of a smaller budget."""
    with pytest.raises(offload.PlanError) as refused:
        captured.load(device, weights_budget=1)
    found = re.search(r"(\d+) bytes", str(refused.value))
    assert found is not None
    return int(found[1])


def budgets_of(captured: Captured) -> list[int]:
    """Budgets from the floor to all weights."""
    floor, whole = floor_of(captured), weight_bytes(captured.program)
    rest = max(0, whole - floor)  # 0 where all weights are too small to be streamed
    return [floor, *(floor + rest * part // 5 for part in range(1, 6)), floor + whole]


def budget_steps(captured: Captured, backend: Backend) -> list[int]:
    """The floor, and each budget at which the plan changes, up to all weights.

    Found by halving: a larger budget admits every plan of a smaller one, so between two budgets
    with the same plan there is no other plan. Plans are those of `load(verify=False)`, which times
    no launches.
    """
    prepared = backend.prepare(captured.bound)
    plan, how = place(prepared, backend), Scheduling.OFFLOAD
    streamer = weight_streamer(captured.bound, backend)
    load = StreamedLoad(prepared, plan, backend, streamer, how, verify=False)
    floor = floor_of(captured, backend.name)
    memory = streamer.memory_layout(captured.program)
    unit = math.lcm(memory.alignment_bytes, memory.unit.unit_bytes)
    n_units = -(-max(0, load.all_bytes - floor) // unit)

    @functools.cache
    def plan_of(number: int) -> tuple[object, object]:
        streaming = load.plan(floor + number * unit)
        return streaming.pieces, streaming.transfers

    def steps(low: int, high: int) -> list[int]:
        if low == high or plan_of(low) == plan_of(high):
            return []
        if high - low == 1:
            return [high]
        middle = (low + high) // 2
        return steps(low, middle) + steps(middle, high)

    return [floor + number * unit for number in (0, *steps(0, n_units))]
