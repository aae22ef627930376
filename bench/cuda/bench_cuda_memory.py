"""Claim: eight captured batch sizes take at most 1.1 times the memory of the largest.

Counted as the decrease of the driver's free memory while they are loaded: arena, graphs and all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offload
from measurements import Case, Figure, counted_ratio

BATCHES = (512, 1, 8, 16, 32, 64, 128, 256)
WIDTH = 2048


def used_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(total_bytes - free_bytes)


def as_figure(n_bytes: int) -> Figure:
    return Figure(n_bytes, n_bytes, n_bytes, n_bytes, n_bytes, 1, "bytes")


def test_batch_sizes(benchmark: Any, record: Callable[[Case], None]) -> None:
    layers = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).cuda().eval()
    inputs = {batch: torch.randn(batch, WIDTH, device="cuda") for batch in BATCHES}
    captured = {}
    for batch, x in inputs.items():
        captured[batch] = offload.capture(model, x)
    # Before the first load, which makes cuBLAS release the workspaces of eager calls.
    expected = {batch: model(x) for batch, x in inputs.items()}
    first = captured[BATCHES[0]].load()  # memory that libraries allocate once is in neither
    first(inputs[BATCHES[0]])
    first.close()
    del first
    before, runs, taken = used_bytes(), [], []
    for batch in BATCHES:
        runs.append(captured[batch].load())
        torch.testing.assert_close(runs[-1](inputs[batch]), expected[batch], rtol=1e-3, atol=1e-3)
        taken.append(used_bytes() - before)
    record(
        Case(
            f"batches of 1 to {BATCHES[0]}",
            ratios={
                "the largest alone": counted_ratio(
                    max(taken[0], 1), max(taken[-1], 1), at_least=1 / 1.1
                )
            },
            figures={"largest": as_figure(taken[0]), "all eight": as_figure(taken[-1])},
        )
    )
    benchmark.pedantic(lambda: runs[0](inputs[BATCHES[0]]), rounds=10)
    torch.cuda.synchronize()
