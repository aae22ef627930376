"""Claim: where nothing moved, a replay costs the host a bare graph launch and at most 1.5 us.

The graph is the same: captured by torch, launched through NVIDIA's bindings. Where inputs and
outputs move at each execution, what each patched word adds is shown without a promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from device_peers import alternating
from device_turns import host_turns
from measurements import Case, figure_of, ratio_of

LAUNCHES = (10, 100, 1000)
ALLOWED_NS = 1500
STAY, MOVE, BARE = "replay, all stay", "replay, all move", "bare launch"


def sines(n_launches: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n_launches):
            x = x.sin()
        return x

    return run


def bare_launch(
    model: Callable[..., torch.Tensor], x: torch.Tensor
) -> tuple[Callable[[], Any], torch.cuda.CUDAGraph]:
    from probe_graph import Execution  # imports NVIDIA's bindings

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    model(x)
    with torch.cuda.graph(graph):
        model(x)
    execution = Execution(graph.raw_cuda_graph())
    stream = torch.cuda.current_stream().cuda_stream
    return lambda: execution.launch(stream), graph


@pytest.mark.parametrize("n_launches", LAUNCHES)
def test_launch(benchmark: Any, record: Callable[[Case], None], n_launches: int) -> None:
    model, x = sines(n_launches), torch.randn(1024, device="cuda")
    with offload.capture(model) as captured:
        expected = captured(x)
    run = captured.load()
    sets = [(x.clone(),), (x.clone(),)]
    outs = [torch.empty_like(x) for _ in sets]
    bare, graph = bare_launch(model, x)
    stay = alternating(run, sets[:1], out=outs[:1])
    move = alternating(run, sets, out=outs)
    move()
    torch.testing.assert_close(move(), expected)
    words = run.last_execution.words_patched
    stay()
    stay()
    assert run.last_execution.slots_changed == 0
    times = host_turns({STAY: stay, MOVE: move, BARE: bare})
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
