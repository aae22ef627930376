"""What cases of several ranks share: numbers, a model, and comparisons with eager calls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import offload

TIMEOUT_S = 20
WORLD = "0"

if torch.__version__ < "2.13":  # as their other names
    all_gather_single: Callable[..., torch.Tensor] = functional.all_gather_tensor
    reduce_scatter_single: Callable[..., torch.Tensor] = functional.reduce_scatter_tensor
else:
    all_gather_single = functional.all_gather_single
    reduce_scatter_single = functional.reduce_scatter_single


def own(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of this rank alone."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(dtype)


def alike(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(function: Callable[..., Any], *shapes: tuple[int, ...], times: int = 3) -> dict[str, Any]:
    """Record a call, and compare executions with eager calls on other inputs bit for bit."""
    captured = offload.capture(function, *[own(*shape) for shape in shapes])
    runs = [captured.load(), captured.load(lanes=2)]
    same = []
    for seed in range(1, times + 1):
        given = [own(*shape, seed=seed) for shape in shapes]
        expected = function(*[one.clone() for one in given])
        expected = expected if isinstance(expected, (tuple, list)) else [expected]
        for run in runs:
            result = run(*[one.clone() for one in given])
            result = result if isinstance(result, (tuple, list)) else [result]
            same += [torch.equal(one, other) for one, other in zip(result, expected, strict=True)]
    names = [launch.name.partition("::")[2] for launch in captured.program.launches]
    for run in runs:
        run.close()
    return {"same": all(same) and len(same) >= times, "launches": names}


class Feedforward(nn.Module):
    """Two layers, the first split by columns and the second by rows."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def check_model(model: nn.Module, *shape: int) -> dict[str, Any]:
    """As `check`, for a model whose input all ranks have."""
    with torch.no_grad():
        captured = offload.capture(model.eval(), alike(*shape))
        seeds = range(1, 5)
        same = [
            torch.equal(run(alike(*shape, seed=seed)), model(alike(*shape, seed=seed)))
            for run in (captured.load(), captured.load(lanes=2))
            for seed in seeds
        ]
    names = [launch.name.partition("::")[2] for launch in captured.program.launches]
    return {"same": all(same), "launches": names}


def begin() -> None:
    """Meet the other ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))


def told(call: Callable[[], object]) -> list[str]:
    """Return the kind and message of a call's error."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def summed(x: torch.Tensor) -> torch.Tensor:
    """The function that all ranks call."""
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def summed_in_place(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x
