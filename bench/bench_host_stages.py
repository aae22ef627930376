"""Claim: at new sizes, threads of the host hide launching behind tiling, where cores are free.

Own kernels on the simulated Ascend runtime, whose sizes are new in each execution: for each of 40
launches shapes are inferred in Python, a function tiles (it hashes bytes, outside the interpreter's
lock), addresses are written, and the runtime is called. A timer replaces the device: a kernel
begins when its launch was made and the preceding one has ended, and takes as long as one tiling. An
execution lasts from the call to the end of the last kernel by this timer. The prediction beside it
is that of the stages' model from their durations on one thread, with free hand-overs and without
waits for the interpreter's lock. Nothing is promised: a launch takes the simulated runtime a few
microseconds, so there is little to hide, and each thread needs a core without other load.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import ascend_simulator
import pytest
import torch
from simulated_ascend import SimulatedAscendBackend, install
from torch.export import Dim

import offload
from measurements import Case, counted_figure, figure_of, ratio_of
from offload.backends.ascend import BinaryCapturer, BinaryKernel, Given, Made, Number
from offload.host.sized_executable import SizedExecutable
from offload.native import _native
from offload.plan.host_stages import LaunchCosts, predict_host_stages
from offload.timeline import SpanKind
from turns import take_single_turns

N_LAUNCHES = 40
ROUNDS = 40
CORES = (1, 2, 3, 4)


@pytest.fixture
def ascend() -> Iterator[ascend_simulator.AscendSimulator]:
    """The simulated runtime."""
    yield from ascend_simulator.for_a_test()


def negated(x: torch.Tensor) -> torch.Tensor:
    """40 launches, each of which reads the result of the preceding one."""
    for _ in range(N_LAUNCHES):
        x = x.neg()
    return x


def content_of(tile_ns: float) -> bytes:
    """Bytes whose hash takes this long."""
    content = bytes(100_000)
    each_ns = min(_hash_ns(content) for _ in range(50))
    return bytes(max(4_096, round(len(content) * tile_ns / each_ns)))


def _hash_ns(content: bytes) -> int:
    begin_ns = time.perf_counter_ns()
    hashlib.sha256(content).digest()
    return time.perf_counter_ns() - begin_ns


def kernel_of(content: bytes) -> BinaryKernel:
    """A no-op kernel whose grid takes a hash to compute."""

    def n_blocks(launch: Any) -> int:
        return 1 + hashlib.sha256(content).digest()[0] % 8

    return BinaryKernel(
        "nothing", n_blocks, (Given(0, "float32"), Made(0, "float32"), Number("Q", 0))
    )


def execution_ns(run: SizedExecutable, x: torch.Tensor, kernel_ns: float) -> float:
    """The duration of an execution at new sizes, with a timer in place of the device."""
    run.forget_sizes()
    with run.timeline() as timeline:
        run(x)
    (execution,) = timeline.executions
    issued = sorted(execution.of_kind(SpanKind.ISSUE), key=lambda one: one.end_ns)
    assert len(issued) == N_LAUNCHES
    device_ns = 0.0
    for one in issued:
        device_ns = max(device_ns, one.end_ns) + kernel_ns
    return device_ns - min(span.begin_ns for span in execution.spans)


def stage_costs(run: SizedExecutable, x: torch.Tensor) -> LaunchCosts:
    """Durations of a launch's stages on one thread; a kernel takes as long as the tiling."""
    taken_ns: dict[str, list[int]] = {"tile": [], "memory": [], "launch": []}
    begun_ns = 0

    def watch(stage: str, launch: int, begins: bool) -> None:
        nonlocal begun_ns
        if begins:
            begun_ns = time.perf_counter_ns()
        else:
            taken_ns[stage].append(time.perf_counter_ns() - begun_ns)

    resident = run._loaded.resident
    assert isinstance(resident, _native.AscendScheduledResident)
    resident.watch(watch)
    for _ in range(10):
        run.forget_sizes()
        run(x)
    resident.watch(None)
    tile_ns, memory_ns, launch_ns = (statistics.median(taken_ns[stage]) for stage in taken_ns)
    return LaunchCosts(tile_ns, memory_ns, launch_ns, tile_ns)


@pytest.mark.parametrize("tile_us", [20, 100])
def test_host_stages(
    benchmark: Any,
    record: Callable[[Case], None],
    ascend: ascend_simulator.AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
    tile_us: int,
) -> None:
    content = content_of(1e3 * tile_us)
    kernel = kernel_of(content)
    image = ascend.binary({"nothing": (24, lambda block, n_blocks: None)})
    backend = SimulatedAscendBackend(BinaryCapturer(image, {"aten::neg": kernel}))
    install(ascend, monkeypatch, backend)
    ascend.set_eager(False)  # enqueued work runs after the executions
    captured = offload.capture(
        negated, torch.ones(6), dynamic_shapes=({0: Dim("n", min=2, max=4096)},)
    )
    runs = {
        cores: captured.load(backend.name, sizes=offload.Sizes(), host_cores=cores)
        for cores in CORES
    }
    x = torch.ones(30)
    one = runs[1]
    assert isinstance(one, SizedExecutable)
    costs = stage_costs(one, x)
    results: dict[int, list[float]] = {cores: [] for cores in CORES}

    def execute(cores: int) -> None:
        run = runs[cores]
        assert isinstance(run, SizedExecutable)
        results[cores].append(execution_ns(run, x, costs.kernel_ns))
        ascend.call("aclrtSynchronizeDevice")

    take_single_turns(
        {str(cores): functools.partial(execute, cores) for cores in CORES}, rounds=ROUNDS
    )
    figures = {f"{cores} threads": figure_of(results[cores], "ns") for cores in CORES}
    for cores in CORES:
        predicted = predict_host_stages([costs] * N_LAUNCHES, cores).total_ns
        figures[f"{cores} threads, predicted"] = counted_figure(predicted, "ns")
    figures["tiling of one launch"] = counted_figure(costs.tile_ns, "ns")
    record(
        Case(
            f"tiling of {tile_us} us",
            ratios={
                f"1 thread, by {cores}": ratio_of(results[1], results[cores]) for cores in CORES[1:]
            },
            figures=figures,
        )
    )
    for run in runs.values():
        run.close()
    benchmark.pedantic(lambda: None, rounds=1)
