"""Helpers of the tests of the torch.compile backend: captures counted, calls against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from checks import Call as Arguments
from checks import assert_same, sharing
from torch import nn


def n_captures(graphs: list[Any]) -> list[int]:
    return [graph._n_captures for graph in graphs]


def n_executions(graphs: list[Any]) -> int:
    loaded = (run for graph in graphs for run in (*graph._runs.values(), *graph._families.values()))
    return sum(run.last_execution.n_executions for run in loaded)


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(model, backend="offload", **options)


def assert_as_eager(model: Callable[..., Any], *calls: Arguments, **options: Any) -> None:
    """Compare results, arguments, state, aliasing and generator after each call and replay."""
    twin = copy.deepcopy(model)
    run = compiled(model, **options)
    for turn, call in enumerate(calls):
        own, theirs = call.copy(), call.copy()
        with torch.no_grad():
            torch.manual_seed(turn)
            expected, generator = theirs.on(twin), torch.get_rng_state()
            torch.manual_seed(turn)
            got = own.on(run)
        assert_same(got, expected, f"call {turn}")
        assert_same(own.args, theirs.args, f"arguments of call {turn}")
        assert torch.equal(torch.get_rng_state(), generator)
        if isinstance(model, nn.Module):
            assert_same(dict(model.state_dict()), dict(twin.state_dict()), f"state, {turn}")
        if turn:  # the recorded call works on aliases of its arguments
            assert sharing(own, got) == sharing(theirs, expected)
