"""Claim: a model's replay at new addresses beats eager, and graphs that copy inputs.

Each call takes inputs from other addresses, and lasts until the device is done. Peers that also
fuse operators are shown without a promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from device_peers import alternating, prepare
from device_turns import device_turns, host_turns
from measurements import Case, figure_of, ratio_of
from probe_models import MODELS

NAMES = ("mlp", "encoder", "bert", "gpt2", "resnet50")
OURS = "offload"
PROMISED = ("eager", "CUDAGraph with copies")


@pytest.mark.parametrize("name", NAMES)
def test_model(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    model, inputs = MODELS[name]()
    with offload.capture(model) as captured:
        expected = captured(*inputs)
    run = captured.load()
    sets = [tuple(one.clone() for one in inputs) for _ in range(2)]
    outs = [torch.empty_like(expected) for _ in sets]
    ours = alternating(run, sets, out=outs)
    torch.testing.assert_close(ours(), expected, rtol=1e-2, atol=1e-2)
    peers, absent = prepare(model, inputs, expected)
    contenders = {OURS: ours, **{peer: alternating(one, sets) for peer, one in peers.items()}}
    times = device_turns(contenders, rounds=20)
    host = host_turns({OURS: ours}, rounds=20)[OURS]
    record(
        Case(
            f"{name}, {len(run.program.launches)} launches",
            ratios={
                peer: ratio_of(times[peer], times[OURS], at_least=1 if peer in PROMISED else None)
                for peer in peers
            },
            figures={
                **{peer: figure_of(found, "ns") for peer, found in times.items()},
                "host time of a replay": figure_of(host, "ns"),
            },
            absent=absent,
        )
    )
    benchmark.pedantic(ours, rounds=20)
    torch.cuda.synchronize()
