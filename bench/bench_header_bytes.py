"""Claim: m_l_t does not grow with the tensors' bytes as copies into frozen buffers do.

The copies are those that graphs with fixed addresses need: one of the input in, one of the output
out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headers import Addresses, Header, check, executable, m_l_t_in_turns
from measurements import Case, Curve, figure_of, ratio_of
from turns import take_turns

KIB = (1, 16, 256, 4096, 16384)
ROUNDS = 30
MOVE, COPY = "m_l_t, both move", "copy in and out"


def header_of(kib: int) -> Header:
    value = torch.randn(kib * 256)
    run = executable(torch.neg, [value])
    arena = torch.empty(run.feature_map_bytes, dtype=torch.uint8)
    one, other = (Addresses([value.clone()], torch.empty_like(value), arena) for _ in range(2))
    header = Header(run, [one, other])
    check(header, value.neg(), 2)
    return header


def copies_of(header: Header) -> Callable[[], None]:
    (given,), result = header.sets[0].inputs, header.sets[0].out
    assert isinstance(result, torch.Tensor)
    frozen_input, frozen_output = torch.empty_like(given), result.clone()

    def copy() -> None:
        frozen_input.copy_(given)
        result.copy_(frozen_output)

    return copy


def test_bytes(benchmark: Any, record: Callable[[Case], None]) -> None:
    headers = {str(kib): header_of(kib) for kib in KIB}
    moved = m_l_t_in_turns(headers, ROUNDS)
    copies = {name: copies_of(header) for name, header in headers.items()}
    copied = take_turns(copies, rounds=ROUNDS, round_ns=200_000)
    small, large = str(KIB[0]), str(KIB[-1])
    record(
        Case(
            "copying input and output",
            ratios={
                "of 1 KiB each": ratio_of(copied[small], moved[small]),
                "of 16 MiB each": ratio_of(copied[large], moved[large], at_least=100),
            },
            curves={
                series: Curve(
                    "KiB of each tensor",
                    KIB,
                    tuple(figure_of(times[str(kib)], "ns") for kib in KIB),
                )
                for series, times in ((MOVE, moved), (COPY, copied))
            },
        )
    )
    benchmark.pedantic(lambda: headers[small].execute(0), rounds=20)
