"""Claim: a replay at new addresses is never slower than copying inputs into static buffers.

Inputs of 1 KB to 256 MB, at other addresses at each call, until the device is done. What fuses
operators as well is shown without a promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from device_peers import alternating, prepare
from device_turns import device_turns
from measurements import Case, figure_of, ratio_of

KILOBYTES = (1, 64, 1_000, 16_000, 256_000)
OURS = "offload"
PROMISED = ("CUDAGraph with copies", "make_graphed_callables")


def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Reads all of its inputs, and returns little, so that they are what is copied."""
    return (x.mean() + y.mean()).expand(8) * 0.5


@pytest.mark.parametrize("kilobytes", KILOBYTES)
def test_copying(benchmark: Any, record: Callable[[Case], None], kilobytes: int) -> None:
    x, y = torch.randn(2, kilobytes * 250, device="cuda")
    with offload.capture(halves) as captured:
        expected = captured(x, y)
    run = captured.load()
    sets = [(x.clone(), y.clone()) for _ in range(2)]
    outs = [torch.empty(8, device="cuda") for _ in sets]
    peers, absent = prepare(halves, (x, y), expected)
    ours = alternating(run, sets, out=outs)
    torch.testing.assert_close(ours(), expected)
    contenders = {OURS: ours, **{name: alternating(one, sets) for name, one in peers.items()}}
    times = device_turns(contenders, calls=4 if kilobytes > 10_000 else 20)
    record(
        Case(
            f"{kilobytes:,} KB per input",
            ratios={
                name: ratio_of(times[name], times[OURS], at_least=1 if name in PROMISED else None)
                for name in peers
            },
            figures={name: figure_of(found, "ns") for name, found in times.items()},
            absent=absent,
        )
    )
    benchmark.pedantic(ours, rounds=20)
    torch.cuda.synchronize()
