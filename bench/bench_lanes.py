"""Claim: independent launches on lanes are quicker, and lanes are never chosen where they are not.

Each program on one lane with one thread for a launch, on one lane with two, and as `lanes="auto"`
has chosen: called repeatedly for 30 ms at a time, with 10 ms between two calls, and while another
process occupies one processor. Also shown: lanes, chosen or not, and their prediction.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import offload
from lane_models import MODELS
from measurements import Case, counted_figure, figure_of, ratio_of
from turns import take_turns

ONE, TWO = "one lane, one thread", "one lane, two threads"
AUTO, LANES = "lanes='auto'", "two lanes"

# Longer than torch's threads spin after a launch (libgomp, GOMP_SPINCOUNT): 4 to 7 ms.
_LEAD_NS = 20_000_000

Calls = dict[str, Callable[[], Any]]


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def busy_processor() -> Iterator[None]:
    """Another process that occupies one processor."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        other.kill()
        other.wait()


def contenders(name: str) -> tuple[Calls, offload.Executable]:
    model, arguments = MODELS[name]()
    captured = offload.capture(model.eval(), *arguments)
    with threads(2):
        runs = {
            ONE: captured.load(),
            TWO: captured.load(),
            AUTO: captured.load(lanes="auto"),
            LANES: captured.load(lanes=2),
        }

    def calling(which: str) -> Callable[[], Any]:
        run, n = runs[which], 1 if which == ONE else 2

        def call() -> Any:
            if torch.get_num_threads() != n:
                torch.set_num_threads(n)
            return run(*arguments)

        return call

    calls = {which: calling(which) for which in runs}
    for call in calls.values():
        call(), call()
    return calls, runs[LANES]


def spaced(calls: Calls, rounds: int) -> dict[str, list[float]]:
    """Durations of single calls with 10 ms before each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(sorted(calls), len(calls)):
            for _ in range(4):
                time.sleep(0.01)
                begin = time.perf_counter_ns()
                calls[name]()
                times[name].append(time.perf_counter_ns() - begin)
    return times


def case_of(name: str, what: str, times: dict[str, list[float]], run: offload.Executable) -> Case:
    choice = run.lane_choice
    assert choice is not None  # as lanes were requested
    figures = {one: figure_of([ns / 1e3 for ns in found], "us") for one, found in times.items()}
    figures["launches on two lanes, predicted"] = counted_figure(choice.predicted_ns / 1e3, "us")
    return Case(
        f"{name}, {what}",
        ratios={
            ONE: ratio_of(times[ONE], times[AUTO]),
            TWO: ratio_of(times[TWO], times[AUTO]),
            "one lane, one thread, against two lanes": ratio_of(times[ONE], times[LANES]),
        },
        figures=figures,
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "what", ["one call after the other", "10 ms between calls", "one core busy"]
)
def test_lanes(benchmark: Any, record: Callable[[Case], None], name: str, what: str) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may run on one processor")
    calls, run = contenders(name)
    if what == "10 ms between calls":
        times = spaced(calls, rounds=10)
    elif what == "one core busy":
        with busy_processor():
            times = take_turns(calls, rounds=30, round_ns=30_000_000, lead_ns=_LEAD_NS)
    else:
        times = take_turns(calls, rounds=30, round_ns=30_000_000, lead_ns=_LEAD_NS)
    benchmark.pedantic(calls[AUTO], rounds=1)
    record(case_of(name, what, times, run))
