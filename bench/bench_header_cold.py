"""Claim: where launches have emptied the processor's caches, a header takes what one operator does.

Each execution reads enough bytes of weights to evict the header from the processor's caches, so
that the next header comes from memory: its code, torch's and Python's, and their data. The peer is
the launch of one operator by Python after the same execution, on 64 numbers. The promise is nine
tenths, as the two are not equally cold. The floor of both is an equally cold call of an empty
Python function.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
from measurements import Case, figure_of, ratio_of

WEIGHTS = (16, 36)
WEIGHT_NUMBERS = 1 << 20  # 4 MiB
ROUNDS = 60

FRESH = "m_l_t"
GIVEN = "m_l_t, out= given"
OPERATOR = "launch of an operator"
NOTHING = "an empty function"


class Products(nn.Module):
    """A product with each of its weights."""

    def __init__(self, n_weights: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WEIGHT_NUMBERS) for _ in range(n_weights))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x and the result [WEIGHT_NUMBERS]."""
        for weight in self.weights:
            x = x * weight
        return x


def call_ns(function: Callable[[], Any]) -> float:
    """Return the duration of a call."""
    begin_ns = time.perf_counter_ns()
    function()
    return time.perf_counter_ns() - begin_ns


@pytest.mark.parametrize("n_weights", WEIGHTS)
def test_cold_header(benchmark: Any, record: Callable[[Case], None], n_weights: int) -> None:
    model, x = Products(n_weights).eval(), torch.randn(WEIGHT_NUMBERS)
    small, out = torch.randn(64), torch.empty(WEIGHT_NUMBERS)
    run = offload.capture(model, x).load()
    torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)

    def header_ns(**given: torch.Tensor) -> float:
        run(x, **given)
        return float(run.last_execution.m_l_t_ns)

    times: dict[str, list[float]] = {FRESH: [], GIVEN: [], OPERATOR: [], NOTHING: []}
    for _ in range(ROUNDS):
        times[FRESH].append(header_ns())
        times[GIVEN].append(header_ns(out=out))
        times[OPERATOR].append(call_ns(lambda: torch.add(small, small)))
        run(x, out=out)
        times[NOTHING].append(call_ns(lambda: None))
    record(
        Case(
            f"{n_weights} weights of 4 MiB",
            ratios={OPERATOR: ratio_of(times[OPERATOR], times[FRESH], at_least=0.9)},
            figures={name: figure_of(values, "ns") for name, values in times.items()},
        )
    )
    benchmark.pedantic(lambda: run(x, out=out), rounds=10)
