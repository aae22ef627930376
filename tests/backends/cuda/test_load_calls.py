"""Driver calls of a load: a constant number per launch, for any number of launches."""

from __future__ import annotations

import pytest
import torch

import offload

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from simulated_backend import install

FUNCTIONS = (
    "cuGraphGetNodes",
    "cuGraphGetEdges",
    "cuGraphNodeGetType",
    "cuGraphKernelNodeGetParams",
    "cuGraphKernelNodeGetAttribute",
    "cuGraphExecKernelNodeSetParams",
    "cuMemMap",
    "cuMemSetAccess",
)


def calls_of_a_load(simulator, backend, n_launches: int) -> list[int]:
    def model(x):
        for _ in range(n_launches):
            x = x.sin()
        return x

    captured = offload.capture(model, torch.randn(8))
    simulator.forget_calls()
    with captured.load(device=backend.name) as run:
        found = list(map(simulator.calls, FUNCTIONS))
        assert len(run.program.launches) == n_launches
    return found


def test_calls_grow_with_the_launches(simulator, monkeypatch):
    backend = install(simulator, monkeypatch)
    calls_of_a_load(simulator, backend, 1)  # calls made once in a process
    few, more, most = (calls_of_a_load(simulator, backend, number) for number in (10, 20, 40))
    for name, *counts in zip(FUNCTIONS, few, more, most, strict=True):
        assert counts[0], name
        assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]), (name, counts)
