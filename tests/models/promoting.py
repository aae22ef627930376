"""A model whose sizes vary and repeat, and helpers of the tests of promotion."""

from __future__ import annotations

import functools
import threading

import torch
from torch import nn
from torch.export import Dim

import offload

N = Dim("n", min=2, max=400)
SIZES = (8, 9, 40)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 48)
        self.third = nn.Linear(48, 16)

    def forward(self, x):
        hidden = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x))))
        return self.third(hidden), hidden


def captured_model(model):
    with torch.no_grad():
        return offload.capture(model, torch.randn(12, 16), dynamic_shapes={"x": {0: N}})


@functools.cache
def captured_layers():
    return captured_model(Layers().eval())


def loaded():
    return captured_layers().load(sizes=offload.Sizes(promoted="64MiB"), fuse=True)


def promoted_sizes(run):
    return [dict(one.sizes)["n"] for one in run.instances.promotion.promoted]


def executed_until_promoted(run, *sizes):
    for size in sizes:
        for _ in range(2):
            run(torch.randn(size, 16))
        assert size in promoted_sizes(run), run.explain()


def ended(run):
    """Wait for running preparations."""
    for thread in threading.enumerate():
        if thread.name == "offload-promote":
            thread.join(60)
    assert not run.instances.promotion.preparing
