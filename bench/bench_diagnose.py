"""Claim: by the clock, many tiny operators are host-bound and one large matmul is device-bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
import offload
from measurements import Case, Ratio
from offload.observe.diagnosis import Diagnosis, MeasuredGain, Verdict


def tiny_operators() -> Diagnosis:
    model, inputs = models.elementwise100()
    return offload.diagnose(model, *inputs)


def large_matmul() -> Diagnosis:
    return offload.diagnose(torch.matmul, torch.randn(2048, 2048), torch.randn(2048, 2048))


@pytest.mark.parametrize(
    ("diagnose", "verdict"),
    [(tiny_operators, Verdict.HOST_BOUND), (large_matmul, Verdict.DEVICE_BOUND)],
)
def test_verdict(
    benchmark: Any,
    record: Callable[[Case], None],
    diagnose: Callable[[], Diagnosis],
    verdict: Verdict,
) -> None:
    found = benchmark.pedantic(diagnose, rounds=1)
    assert isinstance(found.gain, MeasuredGain)
    gain = found.gain
    if verdict is Verdict.HOST_BOUND:
        ratios = {"eager": Ratio(gain.speedup, gain.lower, gain.upper, at_least=2)}
    else:
        ratios = {
            "the other way round": Ratio(
                1 / gain.speedup, 1 / gain.upper, 1 / gain.lower, at_least=0.9
            )
        }
    record(Case(f"{found.subject}: {found.verdict}, {found.confidence}", ratios=ratios))
    assert found.verdict is verdict
