"""Invariants over many steps: flat memory, and activations in no more than eager needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from nets import ResNet18
from torch import nn
from training import captured_step, simple_step

from models import Block

pytestmark = pytest.mark.slow

MANY_STEPS = """
import gc, resource, sys, torch, offload
from torch import nn

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x, target = torch.randn(4, 8), torch.randn(4, 4)
captured = offload.capture_training(model, nn.functional.mse_loss, optimizer, (x, target))
run = captured.load()

def steps(n):
    for number in range(n):
        run(x, target)
        if number % 3 == 0:
            optimizer.zero_grad()  # which executions put in order
    gc.collect()
    return resident_bytes(), sys.getallocatedblocks()

steps(1_000)
before, n_before = steps(1_000)
after, n_after = steps(8_000)
step = optimizer.state[model[0].weight]["step"]
print(after - before, n_after - n_before, int(step))
"""


def test_ten_thousand_steps_in_flat_memory():
    """In a separate process: leftovers of other tests would be counted too."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_STEPS], capture_output=True, text=True, check=True
    )
    grown_bytes, grown_blocks, n_steps = map(int, done.stdout.split())
    assert grown_bytes < 512 * 1024
    assert grown_blocks < 1_000
    assert n_steps == 10_001


def peak_bytes(step, *batch: torch.Tensor) -> int:
    """The peak memory that one step in eager allocates, beyond what existed before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step(*batch)
    events = profile.profiler.kineto_results.events()
    events = sorted(
        (one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()
    )
    alive = peak = 0
    for one in events:
        alive += one.nbytes()
        peak = max(peak, alive)
    return peak


def deep() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = [layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(8, 64), torch.randn(8, 64))


def blocks() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(Block(64, 4), Block(64, 4))
    return model, (torch.randn(2, 32, 64), torch.randn(2, 32, 64))


def residual() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return ResNet18(), (torch.randn(4, 3, 32, 32), torch.rand(4, 10))


@pytest.mark.parametrize("make", [deep, blocks, residual])
@pytest.mark.parametrize("fused", [False, True])
def test_activations_need_no_more_than_eager(make, fused):
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    loss_fn = F.cross_entropy if make is residual else F.mse_loss
    step = simple_step(model, optimizer, loss_fn)
    step(*batch)
    optimizer.zero_grad()  # so that those of the last step do not count as freed by this one
    eager = peak_bytes(step, *batch)
    run = captured_step(step, *batch).load()
    run(*batch)
    report = run.memory_report()
    assert report.feature_map_bytes <= 1.02 * report.lower_bound_bytes
    assert report.feature_map_bytes <= eager
