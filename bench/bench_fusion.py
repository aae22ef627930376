"""Claim: a fused replay is quicker than each engine that fuses operators or packs weights.

Calls are made as in `bench_replay`: a fused replay takes its inputs in place and gives fresh
results, while ONNX Runtime and OpenVINO keep theirs at the bound addresses.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from convolutional_models import CONVOLUTIONAL_MODELS
from fused_models import FUSED_MODELS
from measurements import Case, figure_of, ratio_of
from peers import PEERS, prepare, tuned_aot_inductor
from turns import take_turns

FUSED = "offload, fused"
UNFUSED = "offload"
NOT_FUSING = ("eager", "StaticModule")
FUSING = {
    **{peer: make for peer, make in PEERS.items() if peer not in NOT_FUSING},
    "AOTInductor, tuned": tuned_aot_inductor,
}
ALL_MODELS = {**FUSED_MODELS, **CONVOLUTIONAL_MODELS}
ALL_THREADS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("threads", sorted({1, ALL_THREADS}))
@pytest.mark.parametrize("name", ALL_MODELS)
def test_fusion(
    benchmark: Any, record: Callable[[Case], None], tmp_path: Path, name: str, threads: int
) -> None:
    torch.set_num_threads(threads)
    title, make = ALL_MODELS[name]
    model, inputs = make()
    with torch.no_grad(), offload.capture(model) as captured:
        expected = model(*inputs)
    unfused, fused = captured.load(), captured.load(fuse=True)
    tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(fused(*inputs), expected, rtol=tolerance, atol=tolerance)
    unfused(*inputs)
    contenders, absent = prepare(FUSING, model, inputs, expected, tmp_path)
    calls = {FUSED: lambda: fused(*inputs), UNFUSED: lambda: unfused(*inputs), **contenders}
    times = take_turns(calls)
    quickest = min(contenders, key=lambda peer: statistics.median(times[peer]))
    others = [peer for peer in (UNFUSED, *contenders) if peer != quickest]
    record(
        Case(
            title if threads == 1 else f"{title}; {threads} threads",
            ratios={
                f"the quickest peer, {quickest}": ratio_of(
                    times[quickest], times[FUSED], at_least=1
                ),
                **{peer: ratio_of(times[peer], times[FUSED], at_least=1) for peer in others},
            },
            figures={one: figure_of(times[one], "ns") for one in times},
            absent=absent,
        )
    )
    benchmark.pedantic(lambda: fused(*inputs), rounds=20, iterations=10, warmup_rounds=2)
