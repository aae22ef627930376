"""Tensors of all dtypes and layouts in collectives; `rank_loading_cases` runs these cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_checks import (
    WORLD,
    all_gather_single,
    own,
    reduce_scatter_single,
    summed,
    summed_in_place,
    told,
)

import offload

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


_DTYPES = ("bfloat16", "float16", "float64", "int8", "uint8", "int32", "int64", "bool")
_OF_A_DTYPE = {
    "all_reduce": lambda x: functional.all_reduce(x, "max", WORLD),
    "all_gather": lambda x: all_gather_single(x, 0, WORLD),
    "broadcast": lambda x: functional.broadcast(x, 1, WORLD),
}


def as_eager(function: Callable[..., Any], *given: torch.Tensor) -> list[Any]:
    """Compare with eager: return whether an execution gives the same, or the error it raises."""
    expected, result = [], []

    def eager() -> None:
        expected.append(function(*(one.clone() for one in given)).clone())

    def recorded() -> None:
        captured = offload.capture(function, *(one.clone() for one in given))
        result.append(captured.load()(*(one.clone() for one in given)))

    raised, refused = told(eager), told(recorded)
    same = [torch.equal(*pair) for pair in zip(result, expected, strict=False)]
    return [bool(raised[0]), refused[0], same]


@case
def dtypes() -> Any:
    return {
        f"{name} of {dtype}": as_eager(function, own(4, 3).mul(9).to(getattr(torch, dtype)))
        for dtype in _DTYPES
        for name, function in _OF_A_DTYPE.items()
    }


def _rows_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y[1:3])
    return y


def _transposed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y.t())
    return y


def _sent_while_written(x: torch.Tensor) -> torch.Tensor:
    """A functional collective has copied what it sends."""
    y = x + 1
    started = torch.ops._c10d_functional.all_reduce(y, "sum", WORLD)
    y.zero_()
    return torch.ops._c10d_functional.wait_tensor(started) + y


@case
def layouts() -> Any:
    image = own(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    return {
        "empty": as_eager(summed, own(0, 3)),
        "empty, in place": as_eager(summed_in_place, own(0)),
        "a number": as_eager(summed, own(1)[0]),
        "columns": as_eager(lambda x: summed(x[:, 1:3]), own(4, 5)),
        "transposed": as_eager(lambda x: functional.broadcast(x.t(), 0, WORLD) * 2, own(4, 5)),
        "gathered columns": as_eager(lambda x: all_gather_single(x[:, 1], 0, WORLD), own(4, 5)),
        "scattered columns": as_eager(
            lambda x: reduce_scatter_single(x[:, 1:4], "sum", 0, WORLD), own(4, 5)
        ),
        "exchanged columns": as_eager(
            lambda x: functional.all_to_all_single(x.t(), None, None, WORLD), own(5, 4)
        ),
        "expanded": as_eager(lambda x: summed(x.expand(4, 5)), own(1, 5)),
        "channels last": as_eager(summed, image),
        "rows in place": as_eager(_rows_in_place, own(4, 5)),
        "transposed in place": as_eager(_transposed_in_place, own(4, 5)),
        "sent while written": as_eager(_sent_while_written, own(4, 5)),
    }


@case
def columns_in_place() -> Any:
    """Columns next to which gloo itself writes."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y[:, 1])
        dist.broadcast(y[:, 3], 1)
        return y

    def expected(x: torch.Tensor) -> torch.Tensor:
        first, second = all_gather_single((x * 2)[None], 0, WORLD)
        y = x * 2
        y[:, 1] = first[:, 1] + second[:, 1]
        y[:, 3] = second[:, 3]
        return y

    run = offload.capture(call, own(4, 5)).load()
    return torch.equal(run(own(4, 5, seed=1)), expected(own(4, 5, seed=1)))
