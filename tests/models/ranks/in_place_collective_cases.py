"""Collectives of two ranks that write their operands; `collective_rank_cases` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_checks import WORLD, check

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


@case
def in_place_all_reduce() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    return check(call, (4,))


@case
def in_place_of_an_input() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x + 1

    return check(call, (4,))


@case
def in_place_asynchronous() -> Any:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + 1
        work = dist.all_reduce(z, async_op=True)
        other = y.exp()
        work.wait()
        return z + other

    return check(call, (4,), (4,))


@case
def parts_in_place() -> Any:
    """Other parts of a tensor are written and exchanged while one part is."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = dist.all_reduce(y[4:], async_op=True)
        y[:2].mul_(3)
        second = dist.broadcast(y[:2], 1, async_op=True)
        y[2:4].add_(1)
        first.wait()
        y[4:].neg_()
        second.wait()
        return y + 1

    return check(call, (6, 3))


@case
def gathered_into_a_part() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(7, 3)
        gathered = dist.all_gather_into_tensor(y[1:5], x[1:], async_op=True)
        x[0].mul_(2)
        scattered = dist.reduce_scatter_tensor(y[5:6], x[:2] * 1, async_op=True)
        y[0].add_(x[0])
        y[6].add_(1)
        gathered.wait()
        scattered.wait()
        return y * 2

    return check(call, (3, 3))


@case
def halos() -> Any:
    """Rows of one tensor are sent while others are received: all are in flight at once."""
    other = 1 - dist.get_rank()

    def call(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape[0] + 2, x.shape[1])
        y[1:-1] = x
        works = [dist.irecv(y[row], other) for row in (0, -1)]
        works += [dist.isend(y[row], other) for row in (1, -2)]
        y[2:-2].mul_(2)
        for work in works:
            work.wait()
        return y[:-2] + y[1:-1] + y[2:]

    return check(call, (6, 3))


@case
def written_while_it_is_summed() -> Any:
    """Sums in place of the input of a functional sum, which copied it when it started."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        started = torch.ops._c10d_functional.all_reduce(y, "sum", WORLD)
        work = dist.all_reduce(y, async_op=True)
        total = torch.ops._c10d_functional.wait_tensor(started) + 1
        work.wait()
        return total * y

    return check(call, (4,))


@case
def in_place_broadcast() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.broadcast(y, src=0)
        return y - x

    return check(call, (6,))


@case
def lists_gathered() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        return torch.stack(parts)

    return check(call, (3, 2))


@case
def gathered_into() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(6, 2)
        dist.all_gather_into_tensor(whole, x)
        return whole * 2

    return check(call, (3, 2))


@case
def scattered_into() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        part = torch.empty(2, 2)
        dist.reduce_scatter_tensor(part, x)
        return part * 2

    return check(call, (4, 2))


@case
def lists_scattered() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        part = torch.empty(2)
        dist.reduce_scatter(part, list(x.unbind(0)))
        return part * 2

    return check(call, (2, 2))


@case
def all_to_all_into() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received + 1

    return check(call, (4, 2))
