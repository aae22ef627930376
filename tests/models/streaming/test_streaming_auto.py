"""The budget that takes the free memory, and its trial."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import Deep, floor_of
from stored import save_weights, without_memory
from torch import nn

import offload
from offload import Captured
from offload.backends.cpu.streaming import CpuWeights
from offload.load import budget as streamed_load
from offload.run import Executable

KIB = 1024


@pytest.fixture
def deep(tmp_path: Path) -> Captured:
    save_weights(Deep().eval(), tmp_path)
    return offload.capture(without_memory(Deep), torch.randn(4, 128), weights=tmp_path)


def test_auto_takes_all_where_there_is_room(deep: Captured) -> None:
    with deep.load(weights_budget="auto") as run:
        assert not run.streaming.plan.transfers


def test_auto_takes_what_is_free(deep: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(4, 128)
    with deep.load() as run:
        expected = run(given)
    monkeypatch.setattr(CpuWeights, "free_bytes", lambda self, program: 700 * KIB)
    with deep.load(weights_budget="auto") as run:
        assert run.streaming.plan.transfers
        assert run.streaming.plan.memory_bytes <= 700 * KIB
        assert torch.equal(run(given), expected)


def test_auto_below_the_floor_says_what_is_needed(
    deep: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor = floor_of(deep)
    monkeypatch.setattr(CpuWeights, "free_bytes", lambda self, program: floor)
    with pytest.raises(offload.PlanError) as refused:
        deep.load(weights_budget="auto")
    for part in (str(floor), "layers.2", "a ring of", "predicted", "of the feature map"):
        assert part in str(refused.value)


def test_auto_leaves_room_for_the_feature_map(
    deep: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deep.load() as run:
        feature_map_bytes = run.plan.feature_map_bytes
    assert feature_map_bytes > 0
    free_bytes = 700 * KIB
    monkeypatch.setattr(CpuWeights, "free_bytes", lambda self, program: free_bytes)
    with deep.load(weights_budget="auto") as run:
        budget = run.streaming.plan.budget_bytes
    assert budget == int(free_bytes * 0.9) - feature_map_bytes


def test_auto_tries_out_what_it_has_loaded(deep: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights would fit, but executions find no memory beside them."""
    budgets = []
    real = streamed_load.execute_made_up

    def execute(run: Executable, n_executions: int) -> None:
        budgets.append(run.streaming.plan.budget_bytes)
        if run.streaming.plan.is_resident:
            raise offload.OutOfMemory("none left")
        real(run, n_executions)

    monkeypatch.setattr(streamed_load, "execute_made_up", execute)
    with deep.load(weights_budget="auto") as run:
        assert run.streaming.plan.transfers
        assert budgets[0] > run.streaming.plan.budget_bytes


class Counting(nn.Module):
    """Counts its calls in a buffer that is saved."""

    n_calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("n_calls", torch.zeros(16))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.n_calls.add_(1)
        return self.layer(given) + self.n_calls


def test_auto_tries_out_without_changing_stored_weights(tmp_path: Path) -> None:
    save_weights(Counting(), tmp_path)
    given = torch.randn(4, 16)
    captured = offload.capture(without_memory(Counting), given, weights=tmp_path)
    with captured.load() as run:
        expected = [run(given).clone() for _ in range(3)]
    with captured.load(weights_budget="auto") as run:
        assert run.streaming.plan.is_resident
        for one in expected:
            assert torch.equal(run(given), one)


@pytest.mark.parametrize("error", [offload.OutOfMemory, offload.ExecutionError])
def test_auto_tries_less_where_memory_ran_out_alone(
    deep: Captured, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    from offload.backends.cpu import builder as cpu

    budgets = []
    real = cpu.make_stream

    def refuse(program: Any, streaming: Any) -> Any:
        budgets.append(streaming.budget_bytes)
        if len(budgets) < 3:
            raise error("refused")
        return real(program, streaming)

    monkeypatch.setattr(cpu, "make_stream", refuse)
    if error is offload.OutOfMemory:
        with deep.load(weights_budget="auto") as run:
            assert run.streaming.plan.budget_bytes == budgets[-1]
            assert budgets[0] > budgets[1] > budgets[2]
    else:
        with pytest.raises(error, match="refused"):
            deep.load(weights_budget="auto")
        assert len(budgets) == 1


def test_times_that_find_no_memory_are_no_estimates(
    deep: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executions would find none either: `auto` tries less, and a budget is refused."""

    def refuse(*_: Any) -> Any:
        raise offload.OutOfMemory("none left")

    monkeypatch.setattr("offload.load.budget.quickest_ns", refuse)
    with pytest.raises(offload.OutOfMemory, match="none left"):
        deep.load(weights_budget=floor_of(deep))


LIMITED = """
import resource, torch, offload
from pathlib import Path

def padded(given):
    return torch.nn.functional.pad(given, (0, 2_000_000)).sum(1)

captured = offload.capture(padded, torch.randn(40, 64))
lines = Path("/proc/self/status").read_text().splitlines()
size = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (size + 100 * 2**20,) * 2)
try:
    captured.load(weights_budget="auto")
except offload.OutOfMemory as error:
    print(error)
"""


@pytest.mark.alone
def test_an_operator_that_finds_no_memory_is_out_of_memory() -> None:
    """Its own memory is outside the plan: only a trial shows that it is missing."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=True
    )
    assert "constant_pad_nd" in done.stdout
    assert "320" in done.stdout  # MB that it requested
