"""Functional collectives of two ranks; `collective_rank_cases` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_checks import WORLD, all_gather_single, check, reduce_scatter_single

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


@case
def functional_all_reduce() -> Any:
    return check(lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, (4, 3))


@case
def functional_all_gather() -> Any:
    return check(lambda x: all_gather_single(x + 1, 0, dist.group.WORLD) * 2, (2, 3))


@case
def functional_all_gather_of_columns() -> Any:
    return check(lambda x: all_gather_single(x + 1, 1, dist.group.WORLD) * 2, (2, 3))


@case
def functional_reduce_scatter() -> Any:
    return check(lambda x: reduce_scatter_single(x, "sum", 0, dist.group.WORLD) * 2, (4, 3))


@case
def operators_of_parts() -> Any:
    """Other parts of what is exchanged are written before the calls' own waits."""
    operators = torch.ops._c10d_functional

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        name = dist.group.WORLD.group_name
        y, into = x * 2, torch.zeros(6, 3)
        gathered = operators.all_gather_into_tensor(y[:2], 2, name)
        y[2:4].mul_(3)
        scattered = operators.reduce_scatter_tensor(y[4:6], "sum", 2, name)
        y[6:].add_(1)
        placed = operators.all_gather_into_tensor_out(x[:2], 2, name, out=into[:4])
        into[4:].fill_(1)
        made = [operators.wait_tensor(one) * 1 for one in (gathered, scattered, placed)]
        return *made, y, into

    return check(call, (8, 3))


@case
def functional_broadcast() -> Any:
    return check(lambda x: functional.broadcast(x, 1, dist.group.WORLD) + x, (5,))


@case
def functional_all_to_all() -> Any:
    rank = dist.get_rank()
    sent, received = ([1, 2], [1, 3]) if rank == 0 else ([3, 4], [2, 4])
    return check(
        lambda x: functional.all_to_all_single(x, received, sent, dist.group.WORLD) * 2,
        (sum(sent), 3),
    )


@case
def functional_maximum_of_integers() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce((x * 100).long(), "max", dist.group.WORLD)

    return check(call, (7,))


@case
def coalesced() -> Any:
    def call(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [one + 1 for one in functional.all_reduce_coalesced([x, y], "sum", dist.group.WORLD)]

    return check(call, (3,), (2, 2))


@case
def gathered_coalesced() -> Any:
    """Of two shapes, one of them without elements, and alone."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor_coalesced
    wait = torch.ops._c10d_functional.wait_tensor

    def call(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        started = [*gather([x + 1, y, z.t()], 2, WORLD), *gather([z.t()], 2, WORLD)]
        return [wait(one) * 2 for one in started]

    return check(call, (3, 2), (0, 4), (2, 3))


@case
def gathered_coalesced_of_two_dtypes() -> Any:
    gather = torch.ops._c10d_functional.all_gather_into_tensor_coalesced
    wait = torch.ops._c10d_functional.wait_tensor

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        return [wait(one) + 1 for one in gather([x, (x * 9).long()], 2, WORLD)]

    return check(call, (3, 2))
