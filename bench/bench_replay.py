"""Claim: a replay beats eager and the engine that, like it, runs torch's kernels one by one.

The others fuse operators or pack weights, and are measured without a promise. A replay is called as
by a user: inputs may have moved, and each result is a fresh tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from measurements import Case, figure_of, ratio_of
from models import MODELS
from peers import PEERS, elementwise_loop, prepare
from turns import take_turns

OURS = "offload"
FUSED = "offload, fused"
PROMISED = ("eager", "StaticModule")


@pytest.mark.parametrize("name", MODELS)
def test_replay(benchmark: Any, record: Callable[[Case], None], tmp_path: Path, name: str) -> None:
    title, make = MODELS[name]
    model, inputs = make()
    with offload.capture(model) as captured:
        expected = model(*inputs)
    run = captured.load()
    torch.testing.assert_close(run(*inputs), expected)
    peers = dict(PEERS)
    if name == "elementwise100":
        peers["C++ loop"] = elementwise_loop
    contenders, absent = prepare(peers, model, inputs, expected, tmp_path)
    fused = captured.load(fuse=True)
    torch.testing.assert_close(fused(*inputs), expected, rtol=1e-4, atol=1e-5)
    contenders = {FUSED: lambda: fused(*inputs), **contenders}
    times = take_turns({OURS: lambda: run(*inputs), **contenders})
    record(
        Case(
            title,
            ratios={
                peer: ratio_of(times[peer], times[OURS], at_least=1 if peer in PROMISED else None)
                for peer in contenders
            },
            figures={peer: figure_of(times[peer], "ns") for peer in times},
            absent=absent,
        )
    )
    benchmark.pedantic(lambda: run(*inputs), rounds=20, iterations=10, warmup_rounds=2)
