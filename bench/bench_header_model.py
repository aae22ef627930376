"""Claim: m_l_t of programs that the model never saw is predicted within 20 % on the CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import offload
from measurements import Case, figure_of, ratio_of
from offload.calibration import observe

ROUNDS, EXECUTIONS = 60, 100


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> offload.CostModel:
    folder: Path = tmp_path_factory.mktemp("costs")
    return offload.calibrate(folder=folder)


def several(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + y, (y * z).relu(), (x - z).sin()


HELD_BACK: dict[str, Callable[[], tuple[Any, tuple[torch.Tensor, ...]]]] = {
    "mlp16": lambda: (models.mlp16()[0], (torch.randn(1, 64),)),
    "elementwise100": lambda: (models.elementwise100()[0], (torch.randn(64),)),
    "gpt_stack": lambda: (models.gpt_stack()[0], (torch.randn(1, 16, 64),)),
    "three in, three out": lambda: (several, tuple(torch.randn(3, 128))),
}


Pairs = dict[str, list[tuple[float, float]]]


@pytest.fixture(scope="module")
def pairs(costs: offload.CostModel) -> Pairs:
    """By program, (measured, predicted) m_l_t of each round; the programs take turns."""
    runs = {}
    for name, make in HELD_BACK.items():
        function, inputs = make()
        sets = [(inputs, None), (tuple(torch.randn_like(one) for one in inputs), None)]
        runs[name] = (offload.capture(function, *inputs).load(), sets)
    found: Pairs = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (run, sets) in runs.items():
            observed = list(observe(run, sets, EXECUTIONS))
            measured = statistics.median(one.m_l_t_ns for one in observed)
            predicted = statistics.median(costs.header.m_l_t_ns(one.shape) for one in observed)
            found[name].append((measured, predicted))
    return found


@pytest.mark.parametrize("name", HELD_BACK)
def test_held_back(benchmark: Any, record: Callable[[Case], None], pairs: Pairs, name: str) -> None:
    measured, predicted = zip(*pairs[name], strict=True)
    closeness = [min(pair) / max(pair) for pair in pairs[name]]
    record(
        Case(
            name,
            ratios={
                "the measured m_l_t (1: exact)": ratio_of(closeness, [1.0] * ROUNDS, at_least=0.8)
            },
            figures={
                "measured": figure_of(measured, "ns"),
                "predicted": figure_of(predicted, "ns"),
            },
        )
    )
    function, inputs = HELD_BACK[name]()
    run = offload.capture(function, *inputs).load()
    benchmark.pedantic(run, args=inputs, rounds=20)
