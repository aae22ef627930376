"""Programs with partly independent launches, and helpers that run them on lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import offload
from lane_models import Heads, Recommending
from offload.backends import find_backend
from offload.backends.cpu.lanes import native_lanes
from offload.load.place import place
from offload.native import _native
from offload.plan import Plan, SlotKind
from offload.plan.lane_schedule import schedule_lanes
from offload.plan.launch_conflicts import launch_conflicts
from offload.plan.steps import Lane
from offload.program import BoundProgram, Program


class Towers(nn.Module):
    """Stacks of layers side by side, joined at the end."""

    def __init__(self, width=16, depth=4, n=2):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(one for _ in range(depth) for one in (nn.Linear(width, width), nn.GELU()))
            )
            for _ in range(n)
        )

    def forward(self, x):
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


class Experts(nn.Module):
    """Layers of experts, each of which contributes to the sum."""

    def __init__(self, width=16, n_experts=4, n_layers=2):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, n_experts) for _ in range(n_layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
                for _ in range(n_experts)
            )
            for _ in range(n_layers)
        )

    def forward(self, x):
        for gate, experts in zip(self.gates, self.layers, strict=True):
            share = gate(x).softmax(-1)
            parts = [expert(x) * share[:, i : i + 1] for i, expert in enumerate(experts)]
            for part in parts:
                x = x + part
        return x


class Sorted(nn.Module):
    """Operators that allocate their results, read on both lanes."""

    def forward(self, x):
        values, order = x.sort(-1)
        left = values.cumsum(-1)
        right = values.flip(-1).cumprod(-1)
        return (left.sin() + order, right.cos() - order, F.normalize(left + right))


def programs() -> dict[str, tuple[nn.Module, list[tuple[torch.Tensor, ...]]]]:
    """By name, a model and the arguments of several calls."""
    torch.manual_seed(0)
    made = {
        "towers": (Towers(), lambda: (torch.randn(4, 16),)),
        "three towers": (Towers(24, 3, 3), lambda: (torch.randn(2, 24),)),
        "experts": (Experts(), lambda: (torch.randn(6, 16),)),
        "heads": (Heads(32, 4), lambda: (torch.randn(2, 5, 32),)),
        "tables": (
            Recommending(6, 50, 8),
            lambda: (torch.randn(3, 13), torch.randint(0, 50, (3, 6))),
        ),
        "sorted": (Sorted(), lambda: (torch.randn(8, 16),)),
    }
    return {
        name: (model.eval(), [arguments() for _ in range(4)])
        for name, (model, arguments) in made.items()
    }


def on_lanes(
    bound: BoundProgram, n_lanes: int, launch_ns: Sequence[float] | None = None
) -> offload.Executable:
    """Load on lanes planned for these launch durations, with helpers in each lane."""
    backend = find_backend("cpu")
    prepared = backend.prepare(bound)
    costs = [10.0] * len(bound.program.launches) if launch_ns is None else launch_ns
    found = schedule_lanes(costs, launch_conflicts(bound.program), n_lanes)
    run = offload.Executable(prepared, place(prepared, backend, found.lanes), backend)
    run.lanes.share_always(True)
    return run


def poisoned(run: offload.Executable) -> offload.Executable:
    """Overwrite bytes of the feature map once the last launch that touches them has ended.

    Not in the first execution, which runs in recorded order.
    """
    program, plan, resident = run.program, run.plan, run._loaded.resident
    endings = []
    for value, launches in _launches_of(program).items():
        place_of = plan.places[value]
        if place_of is None:
            continue
        slot = plan.slots[place_of.slot]
        size_bytes = program.values[value].size_bytes
        if slot.kind is SlotKind.FEATURE_MAP and size_bytes:
            endings.append((slot.index, place_of.offset_bytes, size_bytes, launches))
        elif slot.kind is SlotKind.OPERATOR:
            endings.append((slot.index, 0, 0, launches))
    _native.set_lanes(resident, native_lanes(plan.launch_lanes), endings)
    run.lanes.share_always(True)
    return run


def _launches_of(program: Program) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for launch in program.launches:
        for value in {*launch.reads, *launch.writes}:
            found.setdefault(value, []).append(launch.index)
    return found


def without_step(plan: Plan, lane: int, at: int) -> Plan:
    """A Plan whose lane lacks a step."""
    lanes = list(plan.launch_lanes)
    steps = lanes[lane].steps
    lanes[lane] = Lane(lanes[lane].kind, steps[:at] + steps[at + 1 :])
    return dataclasses.replace(plan, launch_lanes=tuple(lanes))
