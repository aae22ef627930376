"""Claim: a replaying process peaks within 5 % of eager's, and the feature map is a third or less.

Processes take turns: one builds the model and calls it, the other opens the saved program and
replays it. The feature map is compared with one in which each value has separate bytes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import offload
from measurements import Case, counted_ratio, figure_of, ratio_of

PROCESS = Path(__file__).parent / "memory_process.py"
ROUNDS = 5
MIB = 2**20


def measure(kind: str, path: Path) -> dict[str, float]:
    finished = subprocess.run(
        [sys.executable, str(PROCESS), kind, str(path)], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_resident(benchmark: Any, record: Callable[[Case], None], tmp_path: Path) -> None:
    model, inputs = models.wide_gpt_stack()
    with offload.capture(model) as captured:
        expected = model(*inputs)
    path = tmp_path / "model.offload"
    captured.save(path)
    found: dict[str, list[dict[str, float]]] = {"eager": [], "offload": []}
    for _ in range(ROUNDS):
        for kind, several in found.items():
            several.append(measure(kind, path))
    checksum = float(expected.double().abs().sum())
    for several in found.values():
        assert all(math.isclose(one["checksum"], checksum, rel_tol=1e-5) for one in several)
    peak = {kind: [one["peak_bytes"] for one in found[kind]] for kind in found}
    growth = {
        kind: [one["peak_bytes"] - one["imported_bytes"] for one in found[kind]] for kind in found
    }
    record(
        Case(
            "eager: 6 GPT blocks, width 256, 512 tokens",
            ratios={
                "peak resident": ratio_of(
                    peak["eager"], peak["offload"], of="bytes", at_least=0.95
                ),
                "peak beyond the imports": ratio_of(growth["eager"], growth["offload"], of="bytes"),
            },
            figures={
                f"{kind}, {what}": figure_of([one / MIB for one in values[kind]], "MiB")
                for what, values in (("peak", peak), ("beyond the imports", growth))
                for kind in values
            },
        )
    )
    run = captured.load()
    benchmark.pedantic(run, args=inputs, rounds=3)


@pytest.mark.parametrize("name", ["mlp16", "gpt_stack", "minilm"])
def test_feature_map(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    title, make = models.MODELS[name]
    model, inputs = make()
    with offload.capture(model) as captured:
        expected = model(*inputs)
    run = captured.load()
    torch.testing.assert_close(run(*inputs), expected)
    memory = run.memory_report()
    assert memory.feature_map_bytes >= memory.lower_bound_bytes
    record(
        Case(
            f"unshared feature map: {title}",
            ratios={
                "feature map": counted_ratio(
                    memory.unshared_bytes, memory.feature_map_bytes, at_least=3
                )
            },
        )
    )
    benchmark.pedantic(run, args=inputs, rounds=3)
