"""Cases of ranks that end, hang, refuse or differ; each runs in separate processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_checks import all_gather_single
from ranks import end_here, main

import offload
from offload.load import overlap, trial

TIMEOUT_S = 6
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run the case if it is asked for."""
    CASES[function.__name__] = function
    return function


def told(call: Callable[[], object]) -> dict[str, Any]:
    """Return how a call failed, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "seconds": time.monotonic() - begin,
        }
    return {"kind": "", "message": "", "seconds": time.monotonic() - begin}


def summed(x: torch.Tensor) -> torch.Tensor:
    """The function that all ranks call."""
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def is_first() -> bool:
    return dist.get_rank() == 0


@case
def killed() -> Any:
    """Rank 1 ends while rank 0 executes."""
    run = offload.capture(summed, torch.ones(1000)).load()
    run(torch.ones(1000))
    if not is_first():
        end_here()
    first = told(lambda: [run(torch.ones(1000)) for _ in range(1000)])
    return first, told(lambda: run(torch.ones(1000)))


@case
def hung() -> Any:
    """Rank 1 does not come; afterwards a program without the group still runs."""
    run = offload.capture(summed, torch.ones(1000)).load()
    other = offload.capture(torch.relu, torch.ones(3)).load()
    run(torch.ones(1000))
    if not is_first():
        time.sleep(TIMEOUT_S + 3)
        return None
    found = told(lambda: run(torch.ones(1000)))
    return found, other(torch.ones(3)).tolist()


@case
def refused() -> Any:
    """Rank 1 reads on the host before the collective, where rank 0 waits for it."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if not is_first() and x.sum().item() > 0:
            x = x + 1
        return summed(x)

    found = told(lambda: offload.capture(call, torch.ones(4)))
    again = offload.capture(summed, torch.ones(4))  # the groups are unchanged
    return found, again(torch.ones(4)).tolist()


@case
def refused_behind_the_call() -> Any:
    """Rank 1 refuses after the call has ended."""
    kept: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        y = summed(x)
        if not is_first():
            kept.append(y)
        return y

    found = told(lambda: offload.capture(call, torch.ones(4)))
    again = offload.capture(summed, torch.ones(4))
    return found, again(torch.ones(4)).tolist()


@case
def raised_by_the_model() -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        if not is_first():
            raise ValueError("no more data")
        return summed(x)

    return told(lambda: offload.capture(call, torch.ones(4)))


@case
def other_collectives() -> Any:
    """Ranks whose calls differ: other collectives, sizes, and one more."""

    def reduces_or_gathers(x: torch.Tensor) -> torch.Tensor:
        if is_first():
            return functional.all_reduce(x, "sum", dist.group.WORLD)
        return all_gather_single(x, 0, dist.group.WORLD)

    def one_more(x: torch.Tensor) -> torch.Tensor:
        y = summed(x)
        return y if is_first() else summed(y)

    return [
        told(lambda: offload.capture(reduces_or_gathers, torch.ones(4))),
        told(lambda: offload.capture(summed, torch.ones(4 if is_first() else 5))),
        told(lambda: offload.capture(one_more, torch.ones(4))),
    ]


@case
def another_program_at_the_load() -> Any:
    """Each rank recorded two programs with the other, and they load different programs."""
    programs = [
        offload.capture(summed, torch.ones(4)),
        offload.capture(lambda x: summed(summed(x)), torch.ones(4)),
    ]
    found = told(programs[dist.get_rank()].load)
    return found, programs[0].load()(torch.ones(4)).tolist()


@case
def other_lanes() -> Any:
    """Rank 0 would execute on made-up inputs, and rank 1 would not."""
    captured = offload.capture(summed, torch.ones(4))
    found = told(lambda: captured.load(lanes="auto" if is_first() else 1))
    return found, captured.load()(torch.ones(4)).tolist()


@case
def refused_at_the_load() -> Any:
    """Rank 1 has given a weight another shape, which its load refuses."""
    model = torch.nn.Linear(4, 4).requires_grad_(False)

    def call(x: torch.Tensor) -> torch.Tensor:
        return summed(model(x))

    captured = offload.capture(call, torch.ones(2, 4))
    if not is_first():
        model.weight.data = torch.ones(4, 8)
    return told(captured.load)


@case
def late_at_the_recording() -> Any:
    """Rank 1 never records."""
    if is_first():
        return told(lambda: offload.capture(summed, torch.ones(4)))
    time.sleep(TIMEOUT_S + 3)
    return None


@case
def a_group_that_is_gone() -> Any:
    group = dist.new_group([0, 1])

    def call(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", group)

    run = offload.capture(call, torch.ones(4)).load()
    run(torch.ones(4))
    dist.destroy_process_group(group)
    return told(lambda: run(torch.ones(4)))


def failing_alone(call: Callable[[torch.Tensor], torch.Tensor], bad: torch.Tensor) -> Any:
    """Executions in a group with a timeout of 3 s, of which rank 1 alone gets refused arguments."""
    run = offload.capture(call, torch.ones(4), host_reads="guard").load()
    run(torch.ones(4))
    found = told(lambda: run(torch.ones(4) if is_first() else bad))
    store, name = dist.distributed_c10d._get_default_store(), run.program.groups[0].name
    if is_first():
        store.set(f"failed/{name}", "")
    store.wait([f"failed/{name}"], timedelta(seconds=60))
    return found


def summed_in(group: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: functional.all_reduce(x, "sum", group)


@case
def another_shape_on_one_rank() -> Any:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    return failing_alone(summed_in(group), torch.ones(5))


@case
def a_guard_that_fails_on_one_rank() -> Any:
    reduced = summed_in(dist.new_group([0, 1], timeout=timedelta(seconds=3)))
    return failing_alone(lambda x: reduced(x + 1 if x.sum().item() > 0 else x), -torch.ones(4))


@case
def killed_in_the_load() -> Any:
    """Rank 1 ends while it waits for rank 0, which then comes to the load."""
    captured = offload.capture(summed, torch.ones(4))
    if not is_first():
        threading.Timer(0.5, end_here).start()
        captured.load()
    time.sleep(1)
    return told(captured.load)


@case
def store_ended_in_the_load() -> Any:
    """Rank 0, which hosts the store, ends while rank 1 waits for it."""
    captured = offload.capture(summed, torch.ones(4))
    if is_first():
        time.sleep(0.5)
        end_here()
    return told(captured.load)


@case
def failing_while_orders_are_timed() -> Any:
    """An execution that the load runs fails on rank 1 alone, where rank 0 waits for it."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    captured = offload.capture(summed_in(group), torch.ones(4))

    def failing(run: Any, n_executions: int) -> None:
        raise offload.ExecutionError("no memory is left")

    if not is_first():
        overlap.execute_made_up = failing
    found = told(lambda: captured.load(lanes="auto"))
    overlap.execute_made_up = trial.execute_made_up
    again = offload.capture(summed, torch.ones(4)).load(lanes="auto")
    return found, again(torch.ones(4)).tolist()


@case
def killed_while_orders_are_timed() -> Any:
    """Rank 1 ends in an execution that the load runs."""
    captured = offload.capture(summed, torch.ones(4))
    if not is_first():
        overlap.execute_made_up = lambda run, n_executions: end_here()
    return told(lambda: captured.load(lanes="auto"))


@case
def diverging_executions() -> Any:
    """Rank 1 executes another program than rank 0, with other sizes."""
    small = offload.capture(summed, torch.ones(4)).load()
    large = offload.capture(
        lambda x: all_gather_single(x, 0, dist.group.WORLD), torch.ones(4096)
    ).load()
    run, x = (small, torch.ones(4)) if is_first() else (large, torch.ones(4096))
    return told(lambda: run(x))


def begin() -> None:
    """Meet the other ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))


def end() -> None:
    """Leave without waiting: some ranks have ended, others are late."""


if __name__ == "__main__":
    main(CASES, begin, end)
