"""Claim: the number of launches lengthens m_l_t only by what colder caches cost.

Patching is one word per slot, however many launches read it. But a long program leaves less of the
header in the processor's caches, and a cold header is slower. So the peer is the header of a short
program that is executed after a program of as many launches: as cold, but short. The promise is
nine tenths, as the two are not equally cold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from headers import Addresses, Header, check, executable, m_l_t_in_turns
from measurements import Case, Curve, figure_of, ratio_of

LAUNCHES = (4, 16, 64, 256, 1024, 4096)
STAY, IO, ALL = "nothing moves", "4 tensors move", "and the feature map"
SLOTS = {STAY: 0, IO: 4, ALL: 5}
SHORT = f"{LAUNCHES[0]} launches, after so many of another"


def chain(n_launches: int) -> Callable[..., torch.Tensor]:
    """Three inputs, one output, and activations in the feature map."""

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        x = inputs[0] + inputs[1] + inputs[2]
        for _ in range(n_launches - 2):
            x = x.neg()
        return x

    return function


def headers_of(n_launches: int) -> dict[str, Header]:
    values = [torch.randn(8) for _ in range(3)]
    function = chain(n_launches)
    run = executable(function, values)
    assert len(run.program.launches) == n_launches
    one, other = (
        Addresses(
            [value.clone() for value in values],
            torch.empty(8),
            torch.empty(run.feature_map_bytes, dtype=torch.uint8),
        )
        for _ in range(2)
    )
    beside = Addresses(other.inputs, other.out, one.feature_map)
    headers = {
        STAY: Header(run, [one]),
        IO: Header(run, [one, beside]),
        ALL: Header(run, [one, other]),
    }
    for name, header in headers.items():
        check(header, function(*values), SLOTS[name])
    return headers


def after(header: Header, other: Header) -> Header:
    """A header each of whose executions follows an execution of another executable."""
    return dataclasses.replace(header, before=lambda: other.m_l_t_ns(0))


def test_launches(benchmark: Any, record: Callable[[Case], None]) -> None:
    headers = {n_launches: headers_of(n_launches) for n_launches in LAUNCHES}
    short = headers_of(LAUNCHES[0])[ALL]
    series = {name: [headers[n][name] for n in LAUNCHES] for name in SLOTS}
    series[SHORT] = [after(short, headers[n][STAY]) for n in LAUNCHES]
    times = m_l_t_in_turns(
        {
            f"{name} {n}": one
            for name, several in series.items()
            for n, one in zip(LAUNCHES, several, strict=True)
        },
        rounds=24,
    )
    record(
        Case(
            "a header as cold, of 4 launches",
            ratios={
                f"{n:,} launches": ratio_of(
                    times[f"{SHORT} {n}"], times[f"{ALL} {n}"], at_least=0.9
                )
                for n in LAUNCHES
            },
            curves={
                name: Curve(
                    "launches",
                    LAUNCHES,
                    tuple(figure_of(times[f"{name} {n}"], "ns") for n in LAUNCHES),
                )
                for name in series
            },
        )
    )
    longest = headers[LAUNCHES[-1]][ALL]
    benchmark.pedantic(lambda: longest.execute(0), rounds=20)
