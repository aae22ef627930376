"""Weights of a model in memory under a budget: executions see writes to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import Deep, budgets_of
from stored_models import mlp
from torch import nn

import offload
from offload.api.captured import Captured
from offload.observe.report import report_on, report_table


def in_memory(model: nn.Module, given: torch.Tensor) -> tuple[Captured, list[int]]:
    """A model captured in memory, and budgets from the floor to all of it."""
    with torch.no_grad():
        captured = offload.capture(model, given)
    return captured, budgets_of(captured)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_in_memory_that_are_written_are_seen(mode: Any) -> None:
    model, given = mlp().eval(), torch.randn(3, 16)
    captured, budgets = in_memory(model, given)
    for budget in budgets:
        with captured.load(weights_budget=budget) as run, mode():
            assert torch.equal(run(given), model(given))
            for parameter in model.parameters():  # one by one: the same, streamed or resident
                parameter.add_(1)
                assert torch.equal(run(given), model(given))
            model[2].weight[1:].mul_(2)  # through a view
            assert torch.equal(run(given), model(given))
            assert torch.equal(run.submit(given).result(), model(given))


def test_without_a_budget_nothing_is_streamed_and_all_that_tells_copes(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 8)
    captured = offload.capture(model, x)
    with captured.load() as run, torch.no_grad():
        assert torch.equal(run(x), model(x))
        assert run.streaming is None
        report = report_on(run, [run.last_execution])
        assert report.streaming is None
        assert report_table(report).row_count > 10
        assert run.memory_report().discarded_bytes == 0
        assert "budget" not in run.explain()
        with run.timeline() as timeline:
            run(x)
        assert timeline.executions[0].bytes_streamed == 0
        captured.save(tmp_path / "model.offload")  # asks open executables what they replaced
        run.rebind_weights()
    assert run.streaming is None
    with offload.open(tmp_path / "model.offload").load() as opened:
        assert opened.streaming is None
    with captured.load(weights_budget="1MiB") as budgeted:
        assert budgeted.streaming is not None


def test_unchanged_weights_in_memory_are_not_read_again() -> None:
    captured, budgets = in_memory(Deep().eval(), torch.randn(4, 128))
    for budget in budgets:
        with captured.load(weights_budget=budget) as run:
            for _ in range(4):
                run(torch.randn(4, 128))
                assert run.last_execution.bytes_streamed == run.streaming.plan.transfer_bytes
            assert run._loaded.weights.stream.generation == 1


def test_writes_that_torch_does_not_count_are_seen_after_a_refresh() -> None:
    model, given = mlp().eval(), torch.randn(3, 16)
    captured, budgets = in_memory(model, given)
    for budget in budgets:
        with captured.load(weights_budget=budget) as run, torch.no_grad():
            run(given)
            for parameter in model.parameters():
                parameter.data.mul_(2)
            run.streaming.refresh()
            assert torch.equal(run(given), model(given))


def test_swapped_storages_are_refused_until_they_are_bound() -> None:
    model, given = mlp().eval(), torch.randn(3, 16)
    captured, budgets = in_memory(model, given)
    for budget in budgets:
        with captured.load(weights_budget=budget) as run, torch.no_grad():
            run(given)
            n_executions = run.last_execution.n_executions
            for parameter in model.parameters():
                parameter.data = torch.randn_like(parameter)
                with pytest.raises(offload.BindingError, match="its storage was swapped"):
                    run(given)
                run.rebind_weights()
                assert torch.equal(run(given), model(given))
            assert run.last_execution.n_executions == n_executions + 4
            model[0].weight.data = torch.randn(32, 15)
            with pytest.raises(offload.BindingError, match="another shape"):
                run.rebind_weights()
            model[0].weight.data = torch.randn(32, 16)
            run.rebind_weights()
            assert torch.equal(run(given), model(given))


def test_memory_that_was_freed_is_refused() -> None:
    model, given = mlp().eval(), torch.randn(3, 16)
    captured, budgets = in_memory(model, given)
    for budget in budgets:
        with captured.load(weights_budget=budget) as run:
            storage = model[0].weight.untyped_storage()
            n_bytes = storage.nbytes()
            with pytest.raises(RuntimeError, match="not resizable"):  # it may be read at any time
                storage.resize_(0)
            assert torch.equal(run(given), model(given))
        storage.resize_(0)
        with pytest.raises(offload.BindingError, match=r"0\.weight"):
            captured.load(weights_budget=budget)
        storage.resize_(n_bytes)
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        with captured.load(weights_budget=budget) as run:
            assert torch.equal(run(given), model(given))


def test_tied_weights_in_memory_are_seen() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.second = nn.Linear(64, 64)
            self.second.weight = nn.Parameter(self.first.weight.data)  # counts separately

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    model, given = Tied().eval(), torch.randn(2, 64)
    captured, budgets = in_memory(model, given)
    for budget in budgets:
        with captured.load(weights_budget=budget) as run, torch.no_grad():
            assert torch.equal(run(given), model(given))
            for layer in (model.first, model.second):
                layer.weight.mul_(-0.5)
                assert torch.equal(run(given), model(given))
