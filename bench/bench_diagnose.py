"""Claim: by the clock, many tiny operators are host-bound and one large matmul is device-bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
import offload
from offload.diagnosis import Diagnosis, MeasuredGain, Verdict


def tiny_operators() -> Diagnosis:
    model, x = models.elementwise100()
    return offload.diagnose(model, x)


def large_matmul() -> Diagnosis:
    return offload.diagnose(torch.matmul, torch.randn(2048, 2048), torch.randn(2048, 2048))


@pytest.mark.parametrize(
    ("diagnose", "verdict"),
    [(tiny_operators, Verdict.HOST_BOUND), (large_matmul, Verdict.DEVICE_BOUND)],
)
def test_verdict(benchmark: Any, diagnose: Callable[[], Diagnosis], verdict: Verdict) -> None:
    found = benchmark.pedantic(diagnose, rounds=1)
    (finding,) = found.findings
    assert isinstance(found.gain, MeasuredGain)
    benchmark.extra_info["diagnosis"] = {
        "verdict": str(found.verdict),
        "confidence": str(found.confidence),
        "1 - t_replay / t_eager": [finding.lower, finding.fraction, finding.upper],
        "t_eager / t_replay": [found.gain.lower, found.gain.speedup, found.gain.upper],
    }
    assert found.verdict is verdict
