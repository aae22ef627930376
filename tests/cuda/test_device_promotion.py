"""Sizes that repeat are promoted to graphs on a GPU; the host launches others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.host import promoter

N = Dim("n", min=2, max=512)


class Layers(nn.Module):
    """A causal mask and positions follow from the size; two results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[0]
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = (x @ x.t()).masked_fill(mask, float("-inf")).softmax(-1)
        hidden = self.second(torch.relu(self.first(scores @ x)))
        return hidden + torch.arange(n, device=x.device).unsqueeze(1), scores


@pytest.fixture
def model() -> Layers:
    return Layers().eval().cuda()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promote every choice of sizes at its second execution."""
    monkeypatch.setattr(promoter, "due_ns", lambda *_: 1)
    monkeypatch.setattr(promoter, "least_due_ns", lambda *_: 1)


def load(model: nn.Module, promoted: int | str = "1GiB", **options: Any) -> Any:
    x = torch.randn(24, 64, device="cuda")
    captured = offload.capture(model, x, dynamic_shapes=({0: N},))
    return captured.load(sizes=offload.Sizes(promoted=promoted), **options)


def check(run: Any, model: nn.Module, size: int) -> bool:
    """Execute and compare with eager; return whether the size was promoted."""
    x = torch.randn(size, 64, device="cuda")
    for one, other in zip(run(x), model(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    return bool(run.last_execution.was_promoted)


@pytest.mark.usefixtures("at_once")
def test_promoted_sizes_are_graphs_and_give_eagers_results(model: Layers) -> None:
    run = load(model)
    seen = [check(run, model, size) for _ in range(3) for size in (8, 9, 200)]
    assert seen == [False] * 3 + [True] * 6
    own = dict(run._promoter.executables())
    assert all({one.mode for one in run.launch_reports()} == {"graph"} for run in own.values())
    addresses = {one._loaded.resident.arena_address for one in own.values()}
    assert len(addresses) == 3
    assert not check(run, model, 100)


@pytest.mark.usefixtures("at_once")
def test_what_a_graph_takes_of_the_device_is_told(model: Layers) -> None:
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    ((_, own),) = run._promoter.executables()
    assert own.memory_report().graph_bytes >= 0
    assert run.instances.promotion.size_bytes >= own.memory_report().graph_bytes


@pytest.mark.usefixtures("at_once")
def test_tickets_of_both_keep_their_order(model: Layers) -> None:
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    result = torch.empty(8, 64, device="cuda")
    inputs = [torch.randn(size, 64, device="cuda") for size in (8, 100, 8, 9, 8) * 8]
    tickets = [run.submit(x, out=(result, None) if len(x) == 8 else None) for x in inputs]
    for x, ticket in zip(inputs, tickets, strict=True):
        torch.testing.assert_close(ticket.result()[1], model(x)[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(result, model(inputs[-1])[0], rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("at_once")
def test_executions_on_other_streams_follow_one_another(model: Layers) -> None:
    """One buffer, written on two streams by graphs and launches in turns."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    inputs = [torch.randn(size, 64, device="cuda") for size in (8, 9, 8, 20, 8, 8)]
    expected = [model(x) for x in inputs]
    out = torch.empty(8, 64, device="cuda")
    torch.cuda.synchronize()
    for turn, x in enumerate(inputs):
        with torch.cuda.stream(streams[turn % 2]):
            run(x, out=(out, None) if len(x) == 8 else None)
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected[-1][0], rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("at_once")
def test_a_callers_capture_has_launches_in_it(model: Layers) -> None:
    """A graph is not executed into another one, and nothing is captured for it."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    x = torch.randn(8, 64, device="cuda")
    out = torch.empty(8, 64, device="cuda"), torch.empty(8, 8, device="cuda")
    run.submit(x).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, out=out)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out[0], model(x)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("at_once")
def test_the_least_recently_used_makes_room(model: Layers) -> None:
    run = load(model)
    check(run, model, 9), check(run, model, 9)
    n_bytes = run.instances.promotion.size_bytes
    run = load(model, promoted=3 * n_bytes)
    for size in (8, 8, 9, 9, 10, 10, 11, 11, 12, 12):
        check(run, model, size)
    report = run.instances.promotion
    assert report.size_bytes <= report.budget_bytes
    assert report.promoted[-1].sizes == (("n", 12),)


def test_auto_measures_launches_against_a_graph(model: Layers) -> None:
    explained = load(model, scheduling="auto").explain()
    assert "scheduled launch by launch, and sizes that repeat as tasks: at n = 24" in explained
    assert "loading the task took" in explained
