"""Claim: a replay at new addresses is never slower than copying inputs into static buffers.

Inputs of 1 KB to 256 MB, at other addresses at each call, until the device is done; and the saved
time grows with the bytes. Peers that also fuse operators are shown without a promise, at the least
and the most bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from device_peers import PEERS, alternating, prepare
from device_turns import device_turns
from measurements import Case, figure_of, ratio_of

KILOBYTES = (1, 64, 1_000, 16_000, 256_000)
OURS = "offload"
PROMISED = ("CUDAGraph with copies", "make_graphed_callables")
ALL_PEERS = KILOBYTES[0], KILOBYTES[-1]  # at these sizes: compiling takes seconds for each


def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Reads all of its inputs, and returns little, so that mainly the inputs are copied."""
    return (x.mean() + y.mean()).expand(8) * 0.5


Contenders = dict[str, Callable[[], Any]]


def contenders_of(kilobytes: int, names: tuple[str, ...]) -> tuple[Contenders, dict[str, str]]:
    """Ours and the peers, at other addresses at each call; and the absent peers, with reasons."""
    x, y = torch.randn(2, kilobytes * 250, device="cuda")
    with offload.capture(halves) as captured:
        expected = captured(x, y)
    run = captured.load()
    sets = [(x.clone(), y.clone()) for _ in range(2)]
    outs = [torch.empty(8, device="cuda") for _ in sets]
    peers, absent = prepare(halves, (x, y), expected, names)
    ours = alternating(run, sets, out=outs)
    torch.testing.assert_close(ours(), expected)
    return {OURS: ours, **{name: alternating(one, sets) for name, one in peers.items()}}, absent


def test_saved(benchmark: Any, record: Callable[[Case], None]) -> None:
    found, absent = {}, {}
    for kilobytes in (KILOBYTES[0], KILOBYTES[-1]):
        found[kilobytes], lacking = contenders_of(kilobytes, PROMISED)
        absent |= lacking
    every = {
        f"{name}, {size:,} KB": call for size, of in found.items() for name, call in of.items()
    }
    times = device_turns(every, calls=4)
    small, large = found

    def saved(name: str, size: int) -> list[float]:
        theirs, own = times[f"{name}, {size:,} KB"], times[f"{OURS}, {size:,} KB"]
        return [one - other for one, other in zip(theirs, own, strict=True)]

    present = [name for name in PROMISED if all(name in of for of in found.values())]
    own = times[f"{OURS}, {large:,} KB"]
    record(
        Case(
            f"{large:,} KB per input beside {small:,} KB",
            ratios={
                f"{name}, if it lost no more than at {small:,} KB": ratio_of(
                    times[f"{name}, {large:,} KB"],
                    [one + gap for one, gap in zip(own, saved(name, small), strict=True)],
                    at_least=1,
                )
                for name in present
            },
            figures={
                f"saved against {name}, {size:,} KB": figure_of(saved(name, size), "ns")
                for name in present
                for size in found
            },
            absent=absent,
        )
    )
    benchmark.pedantic(found[small][OURS], rounds=20)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kilobytes", KILOBYTES)
def test_copying(benchmark: Any, record: Callable[[Case], None], kilobytes: int) -> None:
    names = tuple(PEERS) if kilobytes in ALL_PEERS else ("eager", *PROMISED)
    contenders, absent = contenders_of(kilobytes, names)
    absent |= {name: "run at the least and the most bytes" for name in PEERS if name not in names}
    ours, peers = contenders[OURS], [name for name in contenders if name != OURS]
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
