"""Claim: where nothing moved, a replay costs the host a bare graph launch and at most 1.5 us.

The graph is the same: captured by torch, launched through NVIDIA's bindings, and instantiated both
without flags, the baseline of the promise, and with those of a replay. Where an input that many
kernels read and the output move at each execution: that, plus the measured cost of updating each
node that holds them; or of a copy, where so many nodes hold the input that this is cheaper (K nodes
by the measurement at load, which the figures state).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from device_turns import host_turns
from measurements import Case, counted_figure, figure_of, ratio_of
from models import sines
from turns import user_calls

LAUNCHES = (10, 100, 1000)
READERS = (2, 20, 200, 1000)
ELEMENTS = {"4 KiB": 1 << 10, "64 MiB": 1 << 24}
ALLOWED_NS = 1500
STAY, MOVE, BARE = "replay, all stay", "replay, all move", "bare launch"
BARE_AS_OURS = "bare launch, instantiated as ours"
_USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY, as native/cuda sets it


def sums(n_readers: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """This many kernels, each of which reads the input: its first 1,024 numbers.

    So the host's work for them dominates on a device as well, and their results need little memory,
    although the proof needs it for all of them at once.
    """

    def run(x: torch.Tensor) -> torch.Tensor:
        first = x[:1024]
        total = first.neg()
        for _ in range(n_readers - 1):
            total = total + first
        return total

    return run


def bare_launches(
    model: Callable[..., torch.Tensor], x: torch.Tensor
) -> tuple[dict[str, Callable[[], Any]], torch.cuda.CUDAGraph]:
    """The graph's launch, instantiated without flags and with those of a replay."""
    from probe_graph import Execution  # imports NVIDIA's bindings

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    model(x)
    with torch.cuda.graph(graph):
        model(x)
    stream = torch.cuda.current_stream().cuda_stream
    bare = {}
    for name, flags in ((BARE, 0), (BARE_AS_OURS, _USE_NODE_PRIORITY)):
        execution = Execution(graph.raw_cuda_graph(), flags)
        execution.launch(stream)  # raises where the driver refuses, unlike the bare one
        bare[name] = execution.bare(stream)
    return bare, graph


@pytest.mark.parametrize("n_launches", LAUNCHES)
def test_launch(benchmark: Any, record: Callable[[Case], None], n_launches: int) -> None:
    model, x = sines(n_launches), torch.randn(1024, device="cuda")
    with offload.capture(model) as captured:
        expected = captured(x)
    run = captured.load()
    inputs = [x.clone() for _ in range(2)]
    buffers = [torch.empty_like(x) for _ in inputs]
    bare, graph = bare_launches(model, x)
    stay = user_calls(run, inputs[:1], buffers[:1])
    move = user_calls(run, inputs, buffers)
    move()
    torch.testing.assert_close(move(), expected)
    words = run.last_execution.words_patched
    stay()
    stay()
    assert run.last_execution.slots_changed == 0
    times = host_turns({STAY: stay, MOVE: move, **bare})
    allowed = [one + ALLOWED_NS for one in times[BARE]]
    added = [one - other for one, other in zip(times[MOVE], times[STAY], strict=True)]
    record(
        Case(
            f"{n_launches} launches",
            ratios={"a bare launch and 1.5 us": ratio_of(allowed, times[STAY], at_least=1)},
            figures={
                **{name: figure_of(found, "ns") for name, found in times.items()},
                f"moving, {words} words patched": figure_of(added, "ns"),
            },
        )
    )
    benchmark.pedantic(stay, rounds=20, iterations=10)
    torch.cuda.synchronize()
    del graph


@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("n_readers", READERS)
def test_moved(benchmark: Any, record: Callable[[Case], None], n_readers: int, size: str) -> None:
    model, x = sums(n_readers), torch.randn(ELEMENTS[size], device="cuda")
    with offload.capture(model) as captured:
        expected = captured(x)
    with captured.load() as run:
        (choice,) = (one for one in run.copy_choices if one.n_nodes == n_readers)
        set_node_ns = choice.set_ns / choice.n_nodes
        moving_ns = set_node_ns + (choice.copy_ns if choice.is_copied else choice.set_ns)
        inputs = [x.clone() for _ in range(2)]
        buffers = [torch.empty_like(expected) for _ in inputs]
        bare, graph = bare_launches(model, x)
        move = user_calls(run, inputs, buffers)
        move()
        torch.testing.assert_close(move(), expected)
        assert bool(run.last_execution.bytes_copied) == choice.is_copied
        times = host_turns({MOVE: move, **bare})
        allowed = [one + ALLOWED_NS + moving_ns for one in times[BARE]]
        record(
            Case(
                f"an input of {size} that {n_readers} kernels read",
                ratios={"a bare launch, 1.5 us, nodes": ratio_of(allowed, times[MOVE], at_least=1)},
                figures={
                    **{name: figure_of(found, "ns") for name, found in times.items()},
                    "re-setting a node": counted_figure(set_node_ns, "ns"),
                    "copying the input": counted_figure(choice.copy_ns, "ns"),
                    "K": counted_figure(choice.break_even_nodes, "nodes"),
                    "copied": counted_figure(run.last_execution.bytes_copied, "bytes"),
                },
            )
        )
        benchmark.pedantic(move, rounds=20, iterations=10)
        torch.cuda.synchronize()
    del graph
