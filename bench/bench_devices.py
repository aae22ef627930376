"""Claim: launches on two devices are never slower than on the better one, and stages overlap.

Two devices of one thread each. Programs of independent parts are called one by one, and a chain
whose stages pass inputs on gets many submissions; both are compared with one device. Also timed:
choosing devices anew takes at most 5 us a segment, while paces change before each execution.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from lane_models import MODELS, stack_of
from measurements import Case, counted_figure, figure_of, ratio_of
from offload.backends import CpuBackend
from offload.plan.topology import Link
from offload.run.device_choice import Crossings, DeviceChoice, Placement, SegmentCosts
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


LIMIT_NS = 5_000  # for each segment


def chain_of_segments(n: int, n_devices: int) -> tuple[list[SegmentCosts], Crossings]:
    """Segments of 50 to 400 us that read earlier results, whose copies take as long."""
    draw = random.Random(n)
    link = Link(bytes_per_second=10e9, overhead_ns=15_000)
    segments = []
    for at in range(n):
        costs = tuple(draw.uniform(50e3, 400e3) for _ in range(n_devices))
        after = tuple(sorted({draw.randrange(at) for _ in range(2)} if at else ()))
        reads = tuple(one + 1 for one in after) or (0,)
        segments.append(SegmentCosts(costs, after, 0, reads, (at + 1,)))
    sizes = {value: draw.randint(200_000, 4_000_000) for value in range(n + 1)}
    links = dict.fromkeys(itertools.permutations(range(n_devices), 2), link)
    return segments, Crossings(tuple(range(n_devices)), 0, links, sizes, frozenset({n}))


@pytest.mark.parametrize("placement", [Placement.HYBRID, Placement.DYNAMIC])
@pytest.mark.parametrize(("n_segments", "n_devices"), [(8, 2), (8, 3), (16, 2), (32, 2)])
def test_choice(
    benchmark: Any,
    record: Callable[[Case], None],
    placement: Placement,
    n_segments: int,
    n_devices: int,
) -> None:
    segments, crossings = chain_of_segments(n_segments, n_devices)
    draw = random.Random(0)

    def executing(paces: Callable[[], list[float]]) -> Callable[[], None]:
        choice = DeviceChoice(segments, placement, 10_000.0, crossings=crossings)

        def execute() -> None:
            devices, slow = choice.choose(), paces()
            pairs = zip(segments, devices, strict=True)
            choice.ended(devices, [(one.costs_ns[at] or 0.0) * slow[at] for one, at in pairs])

        return execute

    changing = executing(lambda: [draw.uniform(1.0, 3.0) for _ in range(n_devices)])
    steady = executing(lambda: [1.0] * n_devices)
    times = take_turns({"changing": changing, "steady": steady}, rounds=20, round_ns=5_000_000)
    benchmark.pedantic(changing, rounds=1)
    limit_ns = float(LIMIT_NS * n_segments)
    record(
        Case(
            f"choice, {placement!s}: {n_segments} segments on {n_devices} devices",
            ratios={
                "5 us a segment": ratio_of(
                    [limit_ns] * len(times["changing"]), times["changing"], at_least=1.0
                )
            },
            figures={
                which: figure_of([ns / 1e3 / n_segments for ns in found], "us a segment")
                for which, found in times.items()
            },
        )
    )


@pytest.mark.parametrize(("n_segments", "n_devices"), [(8, 2), (8, 3), (32, 2)])
def test_dispatch(
    benchmark: Any, record: Callable[[Case], None], n_segments: int, n_devices: int
) -> None:
    """The native decisions of `dynamic`: two executions at once, whose segments end one by one."""
    segments, crossings = chain_of_segments(n_segments, n_devices)
    choice = DeviceChoice(segments, Placement.DYNAMIC, 10_000.0, crossings=crossings)
    planned = list(choice.choose())
    dispatch = choice.dispatch()
    draw, now = random.Random(0), itertools.count()

    def executing(paces: Callable[[], list[float]]) -> Callable[[], None]:
        def execute() -> None:
            left = {dispatch.add(planned), dispatch.add(planned)}
            present = paces()
            while left:
                for kind, number, what, to, values in dispatch.next(present, 1e5 * next(now)):
                    if kind == 0:
                        dispatch.segment_ended(number, what)
                        present = paces()
                    elif kind == 1:
                        dispatch.copy_ended(number, to, values)
                    else:
                        left.discard(number)

        return execute

    changing = executing(lambda: [draw.uniform(1.0, 3.0) for _ in range(n_devices)])
    steady = executing(lambda: [1.0] * n_devices)
    times = take_turns({"changing": changing, "steady": steady}, rounds=20, round_ns=5_000_000)
    benchmark.pedantic(changing, rounds=1)
    limit_ns = float(LIMIT_NS * 2 * n_segments)
    record(
        Case(
            f"dispatch: {n_segments} segments on {n_devices} devices",
            ratios={
                "5 us a segment": ratio_of(
                    [limit_ns] * len(times["changing"]), times["changing"], at_least=1.0
                )
            },
            figures={
                which: figure_of([ns / 2e3 / n_segments for ns in found], "us a segment")
                for which, found in times.items()
            },
        )
    )
