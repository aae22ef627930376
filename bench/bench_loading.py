"""Claim: capture and load take at most 100 us per launch plus 50 ms, the model's own runs aside.

Capturing runs the model once and its Program once more; a call of the model is reported beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
import offload


def eager_call_ns(model: torch.nn.Module, x: torch.Tensor) -> float:
    times = []
    for _ in range(15):
        begin = time.perf_counter_ns()
        model(x)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times)


@pytest.mark.parametrize("make", [models.mlp16, models.elementwise100, models.gpt_stack])
def test_capture_and_load(benchmark: Any, make: Callable[[], Any]) -> None:
    model, x = make()

    def capture_and_load() -> offload.Executable:
        with offload.capture(model) as captured:
            model(x)
        return captured.load()

    times = []
    for _ in range(15):
        begin = time.perf_counter_ns()
        run = capture_and_load()
        times.append(time.perf_counter_ns() - begin)
    n_launches = len(run.program.launches)
    benchmark.extra_info["n_launches"] = n_launches
    benchmark.extra_info["median_ms"] = statistics.median(times) / 1e6
    benchmark.extra_info["eager_call_ms"] = eager_call_ns(model, x) / 1e6
    benchmark.extra_info["allowed_ms"] = 50 + 0.1 * n_launches
    benchmark.pedantic(capture_and_load, rounds=5)
