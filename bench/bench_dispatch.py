"""Claim: dispatching a segment takes at most 5 us of processor time beside its submission.

A chain of eight short segments on two devices of one thread, four executions in flight: segments
that stay on their devices and are queued at once (static) beside segments that are given to devices
when they are ready (dynamic), where the devices share memory and where each value is copied.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from apart import apart, apart_devices, movable_tasks

import offload
from measurements import Case, figure_of, ratio_of
from offload.load.placed_devices import PlacedDevices
from offload.run.device_choice import Placement
from offload.run.placed_executable import PlacedExecutable

N_SEGMENTS = 8
N_IN_FLIGHT = 4
N_EXECUTIONS = 32
ROUNDS = 15
LIMIT_NS = 5_000.0


def devices_of(memories: str) -> PlacedDevices:
    """Two devices, which share memory or have their own."""
    found = apart_devices(2)
    if memories == "shared":
        return PlacedDevices(found.names, found.backends, found.memories[:1] * 2, found.home)
    return found


def executed(run: PlacedExecutable, x: torch.Tensor) -> None:
    """Submit executions, a few of them in flight."""
    tickets: deque[Any] = deque()
    for _ in range(N_EXECUTIONS):
        tickets.append(run.submit(x))
        if len(tickets) == N_IN_FLIGHT:
            tickets.popleft().result()
    while tickets:
        tickets.popleft().result()


def processor_ns(runs: Mapping[str, PlacedExecutable], x: torch.Tensor) -> dict[str, list[float]]:
    """By executable, for each round, the process's processor time for a segment; in turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(0)
    for _ in range(ROUNDS):
        for name in draw.sample(sorted(runs), len(runs)):
            executed(runs[name], x)
            begin_ns = time.process_time_ns()
            executed(runs[name], x)
            took_ns = time.process_time_ns() - begin_ns
            found[name].append(took_ns / N_EXECUTIONS / len(runs[name].segments))
    return found


def dispatch_ns(run: PlacedExecutable, x: torch.Tensor) -> list[float]:
    """For each round, the processor time for a segment beside its submission.

    The callbacks of executions that end, in Python, do not count: static placement has them too.
    """
    native = run._dispatcher._native  # type: ignore[union-attr] # it is dynamic
    native.measure()
    executed(run, x)
    found, before = [], native.measured
    for _ in range(ROUNDS):
        executed(run, x)
        after = native.measured
        acting, submitting, ending, n = (
            one - other for one, other in zip(after, before, strict=True)
        )
        found.append((acting - submitting - ending) / n)
        before = after
    return found


@pytest.mark.parametrize("memories", ["shared", "separate"])
def test_dispatch(benchmark: Any, record: Callable[[Case], None], memories: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(N_SEGMENTS)))
    x = torch.randn(4, 16)
    bound = offload.capture(model.eval(), x).bound
    where = {task: at % 2 for at, task in enumerate(movable_tasks(bound.program))}
    runs = {
        str(kind): apart(bound, where, 2, kind, devices_of(memories), costs)
        for kind, costs in ((Placement.STATIC, None), (Placement.DYNAMIC, [5e3, 5e3]))
    }
    expected = model(x)
    assert all(torch.equal(run(x), expected) for run in runs.values())
    took_ns = processor_ns(runs, x)
    benchmark.pedantic(lambda: executed(runs["dynamic"], x), rounds=1)
    beside_ns = dispatch_ns(runs["dynamic"], x)
    figures = {
        f"{name}, {len(runs[name].segments)} segments": figure_of(
            [ns / 1e3 for ns in found], "us a segment"
        )
        for name, found in took_ns.items()
    }
    figures["beside the submission"] = figure_of([ns / 1e3 for ns in beside_ns], "us a segment")
    record(
        Case(
            f"{memories} memory",
            ratios={
                "5 us a segment": ratio_of([LIMIT_NS] * len(beside_ns), beside_ns, at_least=1.0),
                "static": ratio_of(took_ns["static"], took_ns["dynamic"]),
            },
            figures=figures,
        )
    )
    for run in runs.values():
        run.close()
