"""Claim: a new address costs less than a tenth of an operator that eager launches.

Each tensor, input or output, is a separate slot, and all move at each execution. The price of a new
address is the cost of a tensor that moves less that of one that stays. The checks of every tensor
are in both, and are shown without a promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from scipy import stats

from headers import Addresses, Header, check, executable, m_l_t_in_turns
from measurements import Case, Curve, figure_of, ratio_of
from turns import take_turns

TENSORS = (2, 8, 16, 32, 64, 128)
STAY, MOVE, FRESH = "all stay", "all move", "all move, fresh results"


def negate_each(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return [one.neg() for one in inputs]


def headers_of(n_tensors: int) -> dict[str, Header]:
    values = [torch.randn(8) for _ in range(n_tensors // 2)]
    run = executable(negate_each, values)
    arena = torch.empty(run.feature_map_bytes, dtype=torch.uint8)
    one, other = (
        Addresses([value.clone() for value in values], [torch.empty(8) for _ in values], arena)
        for _ in range(2)
    )
    fresh = [Addresses(given.inputs, None, arena) for given in (one, other)]
    headers = {
        STAY: Header(run, [one]),
        MOVE: Header(run, [one, other]),
        FRESH: Header(run, fresh),
    }
    for name, slots_changed in ((STAY, 0), (MOVE, n_tensors), (FRESH, None)):
        check(headers[name], negate_each(*values), slots_changed)
    return headers


def price_ns(times: dict[str, list[float]]) -> list[float]:
    """Return for each round the addition to m_l_t per moving tensor.

    Source: the slope of Theil (1950) and Sen (1968).
    """
    prices = []
    for step in range(len(times[f"{MOVE} {TENSORS[0]}"])):
        added = [times[f"{MOVE} {n}"][step] - times[f"{STAY} {n}"][step] for n in TENSORS]
        prices.append(float(stats.theilslopes(added, TENSORS).slope))
    return prices


def test_slots(benchmark: Any, record: Callable[[Case], None]) -> None:
    headers = {f"{series} {n}": one for n in TENSORS for series, one in headers_of(n).items()}
    times = m_l_t_in_turns(headers)
    x = torch.randn(8)
    prices = price_ns(times)
    eager = take_turns({"neg": x.neg}, rounds=len(prices), round_ns=200_000)["neg"]
    figures = {
        "price of a new address": figure_of(prices, "ns"),
        "eager launch": figure_of(eager, "ns"),
    }
    few, many = TENSORS[1], TENSORS[-1]
    record(
        Case(
            "an eager launch",
            ratios={
                "a new address": ratio_of(eager, prices, at_least=10),
                **{
                    f"m_l_t per tensor, of {n} that move": ratio_of(
                        eager, [one / n for one in times[f"{MOVE} {n}"]]
                    )
                    for n in (few, many)
                },
            },
            figures=figures,
            curves={
                series: Curve(
                    "input and output tensors",
                    TENSORS,
                    tuple(figure_of(times[f"{series} {n}"], "ns") for n in TENSORS),
                )
                for series in (STAY, MOVE, FRESH)
            },
        )
    )
    largest = headers[f"{MOVE} {many}"]
    benchmark.pedantic(lambda: largest.execute(0), rounds=20)
