"""What two ranks do together; each case returns what can be written as JSON."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import main

import offload

TIMEOUT_S = 20
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


def own(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of this rank's own."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(dtype)


def check(function: Callable[..., Any], *shapes: tuple[int, ...], times: int = 3) -> dict[str, Any]:
    """Record a call, and compare executions with eager calls on other inputs, in bits."""
    captured = offload.capture(function, *[own(*shape) for shape in shapes])
    run = captured.load()
    same = []
    for seed in range(1, times + 1):
        given = [own(*shape, seed=seed) for shape in shapes]
        expected = function(*[one.clone() for one in given])
        inputs = [one.clone() for one in given]
        result = run(*inputs)
        expected = expected if isinstance(expected, (tuple, list)) else [expected]
        result = result if isinstance(result, (tuple, list)) else [result]
        same += [torch.equal(one, other) for one, other in zip(result, expected, strict=True)]
    names = [launch.name.partition("::")[2] for launch in captured.program.launches]
    run.close()
    return {"same": all(same) and len(same) >= times, "launches": names}


WORLD = "0"


@case
def functional_all_reduce() -> Any:
    return check(lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, (4, 3))


@case
def functional_all_gather() -> Any:
    return check(lambda x: functional.all_gather_single(x + 1, 0, dist.group.WORLD) * 2, (2, 3))


@case
def functional_all_gather_of_columns() -> Any:
    return check(lambda x: functional.all_gather_single(x + 1, 1, dist.group.WORLD) * 2, (2, 3))


@case
def functional_reduce_scatter() -> Any:
    return check(
        lambda x: functional.reduce_scatter_single(x, "sum", 0, dist.group.WORLD) * 2, (4, 3)
    )


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
def overlapped() -> Any:
    """A collective is started, something else is computed, and the result is waited for."""

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        started = torch.ops._c10d_functional.all_reduce(x, "sum", WORLD)
        other = (y @ y).relu()
        return torch.ops._c10d_functional.wait_tensor(started) + other.sum()

    return check(call, (64,), (8, 8))


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
    """Ranks in another order than in the world, under another name than the world's."""
    group = dist.new_group([1, 0], timeout=timedelta(seconds=TIMEOUT_S), sort_ranks=False)
    found = check(lambda x: functional.broadcast(x, 0, group) * 2, (3,))
    return {**found, "rank": dist.get_rank(group)}


@case
def alone_in_a_group() -> Any:
    groups = [dist.new_group([rank]) for rank in range(2)]
    group = groups[dist.get_rank()]
    return check(lambda x: functional.all_gather_single(x, 0, group) + 1, (3, 2))


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
    return all(torch.equal(run(x), expected) for _ in range(200))


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


def begin() -> None:
    """Meet the others."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))


if __name__ == "__main__":
    main(CASES, begin, dist.destroy_process_group)
