"""Cases of ranks that each load a stage of one model; any number of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from ranks import end_here, main
from torch import nn

import offload

TIMEOUT_S = 8
N_MICRO_BATCHES = 4
ROWS, SIZE = 64, 256  # launches take much longer than messages, so stages are equal
CASES: dict[str, Callable[[], Any]] = {}
ENDING: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


def ending(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it alone, as it breaks the groups."""
    ENDING[function.__name__] = function
    return function


def told(call: Callable[[], object]) -> tuple[str, str]:
    """Return how a call failed."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class Skipping(nn.Module):
    """Layers whose input, and an additional argument, are also read by later layers."""

    def __init__(self, n_layers: int = 8, size: int = SIZE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(n_layers))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y, kept = x, []
        for layer in self.layers:
            y = torch.relu(layer(y)) + x
            kept.append(y.mean())
            y = y.t().contiguous().t()  # columns are contiguous
        return {"y": y * scale, "means": torch.stack(kept)}


class Named(nn.Module):
    """A call with an argument that is given by keyword alone."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return (x + 1).relu() * scale


def given(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, SIZE, generator=generator)
    return x, torch.randn(SIZE, generator=generator)


def model_and_capture() -> tuple[Skipping, offload.Captured]:
    torch.manual_seed(0)
    model = Skipping().eval().requires_grad_(False)
    return model, offload.capture(model, *given(0))


def batches(first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [given(seed) for seed in range(first, first + N_MICRO_BATCHES)]


def called(run: Any, first: int) -> Any:
    return run(batches(first)) if run.number == 0 else run()


@case
def bits() -> Any:
    """Results of micro-batches equal those of one process; each rank holds only its weights."""
    model, captured = model_and_capture()
    alone = captured.load()
    same, kinds = [], []
    pipeline = offload.Pipeline(micro_batches=N_MICRO_BATCHES)
    run = captured.load(pipeline=pipeline)
    for lanes in (1, 2):
        run = captured.load(pipeline=pipeline, lanes=lanes)
        for first in range(1, 4):
            results = called(run, 10 * first)
            kinds.append(type(results).__name__)
            for result, one in zip(results or [], batches(10 * first), strict=False):
                expected, eager = alone(*one), model(*one)
                same.append(list(result) == list(expected) == ["y", "means"])
                same += [torch.equal(result[key], expected[key]) for key in expected]
                same += [torch.equal(result[key], eager[key]) for key in eager]
    explained = run.explain()
    found = {
        "same": same,
        "kinds": sorted(set(kinds)),
        "weight_bytes": run.weight_bytes,
        "whole_bytes": sum(one.nbytes for one in model.parameters()),
        "launches": [len(one) for one in run.stages.launches],
        "n_launches": len(captured.program.launches),
        "explained": f"stage {run.number} of {dist.get_world_size()}" in explained,
        "sends": sum("isend" in one.name for one in run.run.program.launches),
        "receives": sum("irecv" in one.name for one in run.run.program.launches),
    }
    run.close()
    return found


@case
def weights_in_files() -> Any:
    """Each rank reads from a file only what its stage uses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))).eval().requires_grad_(False)
    path = Path(os.environ["RANKS_FOLDER"]) / f"weights{dist.get_rank()}.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    captured = offload.capture(model, torch.ones(2, 16), weights=path)
    run = captured.load(pipeline=offload.Pipeline(micro_batches=2))
    inputs = [torch.full((2, 16), float(at)) for at in range(2)]
    results = run(inputs) if run.number == 0 else run()
    same = [torch.equal(*pair) for pair in zip(results or [], map(model, inputs), strict=False)]
    return [same, len(run.run.bound.bindings.stored), len(captured.bound.bindings.stored)]


@case
def refused() -> Any:
    """Refusals say what to do, on all ranks, before anything is loaded."""
    _, captured = model_and_capture()
    pipeline = offload.Pipeline(micro_batches=2)
    small = offload.capture(torch.relu, torch.ones(3))
    drawing = offload.capture(lambda x: torch.dropout(x, 0.5, train=True) + 1, torch.ones(3))
    named = offload.capture(Named(), torch.ones(3), scale=torch.ones(3))
    writing = offload.capture(lambda x: x.add_(1) * 2, torch.ones(3))
    run = captured.load(pipeline=pipeline)
    x, scale = given(2)
    graded = [given(1), (x.requires_grad_(), scale)] if run.number == 0 else given(1)
    wrong: Any = [(torch.ones(2), torch.ones(SIZE)), given(1)] if run.number == 0 else [given(1)]
    found = {
        "writing": told(lambda: writing.load(pipeline=pipeline)),
        "begins": told(lambda: captured.load(pipeline=offload.Pipeline(2, begins=[Skipping()]))),
        "random": told(lambda: drawing.load(pipeline=pipeline)),
        "too small": told(lambda: small.load(pipeline=pipeline)),
        "none": told(lambda: captured.load(pipeline=offload.Pipeline(micro_batches=0))),
        "no pipeline": told(lambda: captured.load(pipeline=4)),
        "budget": told(lambda: captured.load(pipeline=pipeline, weights_budget="auto")),
        "keyword": told(lambda: named.load(pipeline=pipeline)),
        "a batch": told(lambda: run(wrong)),
        "gradients": told(lambda: run(graded)),
        "too few": told(lambda: run([given(1)])),
    }
    results = run([given(1), given(2)]) if run.number == 0 else run()
    return [found, results is None or len(results)]


@case
def other_programs() -> Any:
    _, captured = model_and_capture()
    if dist.get_rank() == 0:
        captured = offload.capture(lambda x: (x + 1).relu() * 2, torch.ones(4))
    return told(lambda: captured.load(pipeline=offload.Pipeline(micro_batches=2)))


@ending
def killed() -> Any:
    """The last rank ends between two calls."""
    _, captured = model_and_capture()
    run = captured.load(pipeline=offload.Pipeline(micro_batches=N_MICRO_BATCHES))
    called(run, 1)
    if run.is_last:
        end_here()
    return told(lambda: [called(run, 1) for _ in range(100)])


@ending
def failing_in_the_middle() -> Any:
    """The second micro-batch fails on the first rank, which then calls, closes and loads again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, SIZE), nn.Linear(SIZE, SIZE), nn.ReLU())
    rows = torch.zeros(ROWS, dtype=torch.int64)
    captured = offload.capture(model.eval().requires_grad_(False), rows)
    run = captured.load(pipeline=offload.Pipeline(micro_batches=2))
    found = [
        told(lambda last=last: run([rows, last]) if run.number == 0 else run())
        for last in (rows, rows + 8, rows)
    ]
    run.close()
    found.append(told(lambda: captured.load(pipeline=offload.Pipeline(micro_batches=2))))
    return found


@ending
def hung() -> Any:
    """The first rank does not call."""
    _, captured = model_and_capture()
    run = captured.load(pipeline=offload.Pipeline(micro_batches=N_MICRO_BATCHES))
    called(run, 1)
    if run.number == 0:
        dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=60))
        return None
    found = told(lambda: called(run, 1))
    dist.distributed_c10d._get_default_store().set("told", "")
    return found


def begin() -> None:
    """Meet the other ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))


if __name__ == "__main__":
    main(CASES | ENDING if len(sys.argv) > 2 else CASES, begin, lambda: None)
