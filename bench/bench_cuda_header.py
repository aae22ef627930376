"""Claim: where nothing moved, an execution of a CUDA graph costs the host 1.5 us beside its launch.

On the simulated driver, whose kernels are no-ops. Timed is our own work: a call with `out=` less a
bare cuGraphLaunch of a graph of as many nodes, through NVIDIA's bindings with arguments made
before. Our other driver calls (two that query the context, one that queries whether the stream is
captured) have the simulated driver's cost here, and torch's stream is not queried. `make
bench-cuda` measures the whole on a GPU. From Python 3.12 on an object is called without a tuple of
its arguments; before, it costs more and nothing is promised. The case that all inputs and outputs
move is shown without a promise: the cost of updating a node is the driver's.
"""

from __future__ import annotations

import operator
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulator as simulators
import torch

import offload
from measurements import Case, figure_of, ratio_of
from models import sines
from turns import user_calls

# Launches, and weights that they read. BERT has 200: nothing is promised, as each is compared.
CASES = ((1, 0), (10, 0), (200, 0), (200, 200))
ALLOWED_NS = 1_500
PROMISED = 1 if sys.version_info >= (3, 12) else None
ROUNDS = 60
CALLS = 20
STAY, MOVE, BARE = "replay, all stay", "replay, all move", "bare launch"


@pytest.fixture
def simulator() -> Iterator[simulators.Simulator]:
    """The simulated driver."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
    yield from simulators.for_a_test()


def bare_launch(simulator: simulators.Simulator, n_launches: int) -> Callable[[], Any]:
    """A graph of kernels of one output and one input, launched on the default stream."""
    import driver_client
    from aten_capturer import launch_kernel
    from cuda.bindings import driver

    sizes = [8, 8]
    kernel = simulator.kernel("bare", sizes, lambda block: None)
    stream = driver_client.stream()
    with driver_client.capture(stream) as graph:
        for _ in range(n_launches):
            launch_kernel(stream, kernel, sizes, bytes(sum(sizes)))
    execution = driver_client.call("cuGraphInstantiate", graph[0], 0)
    default = driver.CUstream(0)
    return lambda: driver.cuGraphLaunch(execution, default)


def turns(contenders: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """For each contender and round, the ns of one call; the device is idle before a turn."""
    from cuda.bindings import driver

    times: dict[str, list[float]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for _ in range(ROUNDS):
        for name in draw.sample(sorted(contenders), len(contenders)):
            call = contenders[name]
            call()
            driver.cuCtxSynchronize()
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter_ns() - begin) / CALLS)
            driver.cuCtxSynchronize()
    return times


class Scaled(torch.nn.Module):
    """A chain of launches, each of which reads a weight of its own."""

    def __init__(self, n_weights: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(8) for _ in range(n_weights))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add each weight to `x`, of shape (8,)."""
        for weight in self.weights:
            x = x + weight
        return x


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_cuda_header(
    benchmark: Any,
    record: Callable[[Case], None],
    simulator: simulators.Simulator,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[int, int],
) -> None:
    from simulated_backend import SimulatedBackend, install

    n_launches, n_weights = case
    # A built-in function that returns the default stream of device 0 without a frame.
    monkeypatch.setattr(SimulatedBackend, "current_stream", operator.index)
    backend = install(simulator, monkeypatch)
    model, x = (Scaled(n_weights) if n_weights else sines(n_launches)), torch.randn(8)
    captured = offload.capture(model, x)
    expected = model(x)
    with captured.load(device=backend.name) as run:
        inputs = [x.clone() for _ in range(2)]
        buffers = [torch.empty_like(x) for _ in inputs]
        stay = user_calls(run, inputs[:1], buffers[:1])
        move = user_calls(run, inputs, buffers)
        for _ in inputs:
            torch.testing.assert_close(move(), expected)
        move()
        assert run.last_execution.slots_changed == 2
        stay()
        stay()
        assert run.last_execution.slots_changed == 0
        bare = bare_launch(simulator, n_launches)
        simulator.set_eager(False)  # enqueued work runs after the calls
        times = turns({STAY: stay, MOVE: move, BARE: bare})
        own = {
            name: [one - other for one, other in zip(times[name], times[BARE], strict=True)]
            for name in (STAY, MOVE)
        }
        record(
            Case(
                f"{n_launches} launches, {n_weights} weights",
                ratios={
                    "1.5 us": ratio_of(
                        [ALLOWED_NS] * ROUNDS,
                        own[STAY],
                        at_least=None if n_launches > 10 else PROMISED,
                    )
                },
                figures={
                    f"{name}, less a bare launch": figure_of(found, "ns")
                    for name, found in own.items()
                },
            )
        )
        benchmark.pedantic(stay, rounds=1)
        simulator.set_eager(True)
