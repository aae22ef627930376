"""Executables for the tests of arguments that an execution accepts and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import capturing
import pytest
import torch
from torch import nn

import offload
from offload.host import promoter

pytest.register_assert_rewrite("compiling")


class Layers(nn.Module):
    """Reads x and mask, writes the history in place; two fresh results and an alias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x, history, *, mask=None):
        hidden = torch.relu(self.first(x))
        history.add_(1)
        self.steps.add_(1)
        scores = self.second(hidden)
        return scores * mask, hidden.sum(-1), history[1:]

    @staticmethod
    def arguments() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """New arguments for one call."""
        return (torch.randn(2, 8), torch.zeros(5)), {"mask": torch.ones(2, 4)}


@pytest.fixture
def model() -> Layers:
    return Layers().eval()


@pytest.fixture
def run(model: Layers) -> Iterator[offload.Executable]:
    """The model, recorded with its arguments."""
    args, kwargs = model.arguments()
    with torch.no_grad(), offload.capture(model) as captured:
        captured(*args, **kwargs)
    with captured.load() as executable:
        yield executable


@pytest.fixture
def two_results() -> offload.Executable:
    """The sum of two inputs, and the sine of their product."""
    with offload.capture(lambda a, b: (a + b, (a * b).sin())) as captured:
        captured(torch.randn(4), torch.randn(4))
    return captured.load()


@pytest.fixture
def compiler_reset() -> Iterator[None]:
    """Reset torch.compile around each test, so that tests share no compiled code."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(compiler_reset: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the graphs that torch.compile hands to offload from now on."""
    from offload.integrations.torch_compile import CompiledGraph

    made: list[Any] = []
    build = CompiledGraph.__init__

    def noted(graph: CompiledGraph, *args: Any) -> None:
        build(graph, *args)
        made.append(graph)

    monkeypatch.setattr(CompiledGraph, "__init__", noted)
    return made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promote every choice of sizes at its second execution."""
    monkeypatch.setattr(promoter, "due_ns", lambda *_: 1)
    monkeypatch.setattr(promoter, "least_due_ns", lambda *_: 1)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.waited(monkeypatch)
