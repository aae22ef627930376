"""Collectives, messages and groups of two ranks; each case returns data that JSON can hold."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from functional_collective_cases import CASES as FUNCTIONAL
from in_place_collective_cases import CASES as IN_PLACE
from rank_checks import TIMEOUT_S, WORLD, all_gather_single, begin, check, own
from ranks import main

import offload

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


@case
def messages() -> Any:
    """Both send before they receive, as neighbours of a pipeline do."""
    other = 1 - dist.get_rank()

    def call(x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        sent = x * 3
        works = [dist.isend(sent, other), dist.irecv(received, other)]
        for work in works:
            work.wait()
        return received + 1

    return check(call, (5,))


@case
def one_way_messages() -> Any:
    """Ranks whose programs differ: one sends, the other receives."""
    if dist.get_rank() == 0:

        def send(x: torch.Tensor) -> torch.Tensor:
            y = x.relu()
            dist.send(y, 1, tag=3)
            return y

        return check(send, (4, 2))

    def receive(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(4, 2)
        dist.recv(y, 0, tag=3)
        return y * 2

    return check(receive, (4, 2))


@case
def a_group_of_its_own() -> Any:
    """Ranks in another order than in the world, under another name."""
    group = dist.new_group([1, 0], timeout=timedelta(seconds=TIMEOUT_S), sort_ranks=False)
    found = check(lambda x: functional.broadcast(x, 0, group) * 2, (3,))
    return {**found, "rank": dist.get_rank(group)}


@case
def alone_in_a_group() -> Any:
    groups = [dist.new_group([rank]) for rank in range(2)]
    group = groups[dist.get_rank()]
    return check(lambda x: all_gather_single(x, 0, group) + 1, (3, 2))


@case
def complex_numbers() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        reduced = functional.all_reduce(torch.complex(x, x + 1), "sum", dist.group.WORLD)
        return torch.view_as_real(reduced * 2)

    return check(call, (3,))


@case
def many_executions() -> Any:
    run = offload.capture(
        lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1, own(16)
    ).load()
    x = own(16, seed=5)
    expected = run(x)
    same = all(torch.equal(run(x), expected) for _ in range(200))
    left = torch._C._distributed_c10d._get_work_registry_size()  # collectives in flight, by torch
    return [same, left]


@case
def a_launch_that_fails_while_a_collective_is_under_way() -> Any:
    """The execution waits for its collective, though nothing reads the sum; the next is right."""

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        started = torch.ops._c10d_functional.all_reduce(x, "sum", WORLD)
        if y.sum().item() > 0:
            y = y + 1
        return torch.ops._c10d_functional.wait_tensor(started) + y

    x, y = own(64), torch.ones(64)
    run = offload.capture(call, x, y, host_reads="guard").load()
    expected = run(x, y)
    failed = []
    for _ in range(20):
        try:
            run(x, -y if dist.get_rank() == 0 else y)
        except offload.BindingError as error:
            failed.append("read" in str(error))
    return [failed, torch.equal(run(x, y), expected)]


@case
def tickets() -> Any:
    run = offload.capture(
        lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1, own(16)
    ).load()
    given = [own(16, seed=seed) for seed in range(8)]
    waiting = [run.submit(one) for one in given]
    results = [one.result() for one in waiting]
    direct = [run(one) for one in given]
    return all(torch.equal(one, other) for one, other in zip(results, direct, strict=True))


@case
def an_execution_meets_an_eager_call() -> Any:
    """On one rank the call is executed, on the other it runs eagerly, in turns."""
    operators = torch.ops._c10d_functional

    def call(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        started = [
            *operators.all_gather_into_tensor_coalesced([x, y + 1], 2, WORLD),
            *operators.all_reduce_coalesced([y, x * 2], "sum", WORLD),
            operators.all_gather_into_tensor(y, 2, WORLD),
        ]
        return [operators.wait_tensor(one) for one in started]

    shapes = (3, 2), (5,)
    run = offload.capture(call, *[own(*shape) for shape in shapes]).load()
    same = True
    for seed in range(1, 5):
        given = [own(*shape, seed=seed) for shape in shapes]
        expected = call(*given)
        found = (run if dist.get_rank() == seed % 2 else call)(*given)
        same &= all(map(torch.equal, found, expected))
    run.close()
    return {"same": same}


@case
def overlapped() -> Any:
    """A collective is started, other values are computed, and the result is waited for."""

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        started = torch.ops._c10d_functional.all_reduce(x, "sum", WORLD)
        other = (y @ y).relu()
        return torch.ops._c10d_functional.wait_tensor(started) + other.sum()

    return check(call, (64,), (8, 8))


if __name__ == "__main__":
    main(FUNCTIONAL | IN_PLACE | CASES, begin, dist.destroy_process_group)
