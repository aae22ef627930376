"""Claim: launches on two devices are never slower than on the better one, and stages overlap.

Two devices of one thread each. Programs of independent parts are called one by one, and a chain
whose stages pass inputs on gets many submissions; both are compared with one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from lane_models import MODELS, stack_of
from measurements import Case, counted_figure, figure_of, ratio_of
from offload.backends import CpuBackend
from turns import take_turns

ONE, PLACED = "one device", "two devices"
CALLED = "one device, called one by one"
N_INPUTS = 32


def one_thread() -> CpuBackend:
    return CpuBackend(threads=1)


@pytest.mark.parametrize("name", MODELS)
def test_latency(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    model, arguments = MODELS[name]()
    captured = offload.capture(model.eval(), *arguments)
    runs = {
        ONE: captured.load(one_thread()),
        PLACED: captured.load([one_thread(), one_thread()], objective="latency"),
    }
    calls = {which: (lambda run=run: run(*arguments)) for which, run in runs.items()}
    times = take_turns(calls, rounds=20, round_ns=20_000_000)
    benchmark.pedantic(calls[PLACED], rounds=1)
    figures = {which: figure_of([ns / 1e3 for ns in found], "us") for which, found in times.items()}
    placed = runs[PLACED]
    figures["segments"] = counted_figure(len(placed.segments), "")
    figures["predicted"] = counted_figure(placed.placement.latency_ns / 1e3, "us")
    record(
        Case(f"latency: {name}", ratios={ONE: ratio_of(times[ONE], times[PLACED])}, figures=figures)
    )


@pytest.mark.parametrize("width", [64, 256])
def test_throughput(benchmark: Any, record: Callable[[Case], None], width: int) -> None:
    model, x = stack_of(width, 16), torch.randn(16, width)
    captured = offload.capture(model.eval(), x)
    one = captured.load(one_thread())
    placed = captured.load([one_thread(), one_thread()], objective="throughput")
    inputs = [torch.randn(16, width) for _ in range(N_INPUTS)]
    calls = {
        CALLED: lambda: [one(each) for each in inputs],
        ONE: lambda: list(one.map(inputs, buffersize=6)),
        PLACED: lambda: list(placed.map(inputs, buffersize=6)),
    }
    times = take_turns(calls, rounds=20, round_ns=20_000_000)
    benchmark.pedantic(calls[PLACED], rounds=1)
    figures = {
        which: figure_of([ns / 1e3 / N_INPUTS for ns in found], "us")
        for which, found in times.items()
    }
    figures["segments"] = counted_figure(len(placed.segments), "")
    figures["predicted"] = counted_figure(placed.placement.period_ns / 1e3, "us")
    record(
        Case(
            f"throughput: 16 layers of {width}",
            ratios={name: ratio_of(times[name], times[PLACED]) for name in (ONE, CALLED)},
            figures=figures,
        )
    )
