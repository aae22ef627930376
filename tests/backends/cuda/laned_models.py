"""Models with independent branches, and the graphs that lanes are made of."""

from __future__ import annotations

import torch
from torch import nn

import offload
from offload.backends.cuda import lanes as cuda_lanes

DEVICE = "cuda-simulated"

KERNEL_NS = 10_000


class Towers(nn.Module):
    """Independent branches of an input, and their sum."""

    def __init__(self, n_towers=3, depth=3):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(16, 16), nn.Tanh()) * depth) for _ in range(n_towers)
        )

    def forward(self, x):
        return sum(tower(x) for tower in self.towers)


def captured_of(model, seed=0):
    torch.manual_seed(seed)
    model = model.eval()
    return offload.capture(model, torch.randn(4, 16))


def eager(x):
    """The results of the towers of `captured_of`."""
    torch.manual_seed(0)
    with torch.no_grad():
        return Towers().eval()(x)


def note_graphs(monkeypatch):
    """Return a list of (the capture, the one with lanes), in which later loads enter theirs."""
    found = []
    with_edges = cuda_lanes._with_edges

    def note(capture, edges):
        laned = with_edges(capture, edges)
        found.append((capture, laned))
        return laned

    monkeypatch.setattr(cuda_lanes, "_with_edges", note)
    return found
