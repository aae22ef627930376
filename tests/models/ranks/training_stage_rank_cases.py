"""Cases of ranks that each load a stage of one training step; any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import end_here, main
from staged_training import (
    OPTIMIZERS,
    ROWS,
    SIZE,
    Sampling,
    Twin,
    compared,
    gpt,
    mlp,
    noisy,
    normalized,
    stepped,
    told,
)
from torch import nn

import offload

TIMEOUT_S = 120  # ranks record and load at different speeds
SHORT_TIMEOUT_S = 8
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


@case
def bits() -> Any:
    """Optimizers and numbers of micro-batches, under both schedules."""
    sizes = {"sgd": (1, 5), "adamw": (2,), "adamw, fused": (5,)}
    return {
        f"{name}, {n_micro_batches}": compared(mlp, optimizer, n_micro_batches)
        for name, optimizer in OPTIMIZERS.items()
        for n_micro_batches in sizes.get(name, (4,))
    }


@case
def clipped() -> Any:
    """Clipping by the norm of all gradients; gradients that each step makes anew."""
    return {
        f"{name}, {drops}": compared(mlp, OPTIMIZERS[name], 4, norm=0.1, drops=drops)
        for name, drops in (("sgd", True), ("adamw, foreach", False), ("adamw, fused", True))
    }


@case
def running_statistics() -> Any:
    """Batch normalization, whose statistics each micro-batch writes in place."""
    return {"sgd": compared(normalized, OPTIMIZERS["sgd"], 3)}


@case
def of_gpt() -> Any:
    """Blocks of a GPT, also where the embedding and the head share their weight."""
    return {
        f"tied={tied}": compared(lambda tied=tied: gpt(tied=tied), OPTIMIZERS["adamw, foreach"], 4)
        for tied in (False, True)
    }


@case
def with_dropout() -> Any:
    """A GPT with dropout, one whose embedding is its head, and other draws."""
    adamw = OPTIMIZERS["adamw, foreach"]
    return {
        "gpt, 1": compared(lambda: gpt(p=0.3), adamw, 1),
        "gpt, 4": compared(lambda: gpt(p=0.3), adamw, 4, norm=0.1),
        "gpt, tied, 3": compared(lambda: gpt(tied=True, p=0.1), OPTIMIZERS["sgd, foreach"], 3),
        "noisy, 2": compared(noisy, OPTIMIZERS["adamw, fused"], 2),
    }


@case
def with_scaler() -> Any:
    """A GradScaler, whose scale grows, and whose check passes from rank to rank."""
    return {"adamw, fused": compared(mlp, OPTIMIZERS["adamw, fused"], 3, scales=True)}


@case
def refused() -> Any:
    """Refusals say what to do, on all ranks, before anything is loaded."""
    n_ranks = dist.get_world_size()
    captured = Twin(mlp(), OPTIMIZERS["sgd"]).captured(2)
    sampling = Twin(nn.Sequential(mlp(), Sampling()), OPTIMIZERS["sgd"]).captured(2)
    small = Twin(nn.Sequential(nn.Linear(SIZE, SIZE)), OPTIMIZERS["sgd"]).captured(2)
    run = captured.load(pipeline=offload.Pipeline())
    n_executions = run.run.last_execution.n_executions
    given: Any = (torch.ones(2, ROWS, SIZE), torch.ones(3, ROWS, SIZE))
    found = {
        "random": told(lambda: sampling.load(pipeline=offload.Pipeline())),
        "small": told(lambda: small.load(pipeline=offload.Pipeline())),
        "number": told(lambda: captured.load(pipeline=offload.Pipeline(3))),
        "schedule": told(lambda: captured.load(pipeline=offload.Pipeline(schedule="2F2B"))),
        "begins": told(lambda: captured.load(pipeline=offload.Pipeline(begins=["0"]))),
        "no list": told(lambda: captured.load(pipeline=offload.Pipeline(begins=nn.Linear(2, 2)))),
        "foreign": told(
            lambda: captured.load(pipeline=offload.Pipeline(begins=[nn.Linear(2, 2)] * n_ranks))
        ),
        "lanes": told(lambda: captured.load(pipeline=offload.Pipeline(), lanes=2)),
        "arguments": told(lambda: run(*given)),
    }
    assert run.run.last_execution.n_executions == n_executions
    batch = Twin(mlp(), OPTIMIZERS["sgd"]).batch(2, 7)
    return [found, run.is_last, stepped(run, *batch) is not None]


@case
def other_steps() -> Any:
    """Ranks with other numbers of micro-batches."""
    captured = Twin(mlp(), OPTIMIZERS["sgd"]).captured(2 + dist.get_rank())
    return told(lambda: captured.load(pipeline=offload.Pipeline()))


@case
def given_cut() -> Any:
    """A stage that begins with a given module; parameters keep their place in each rank."""
    model = mlp()
    twin = Twin(model, OPTIMIZERS["adamw, foreach"])
    captured = twin.captured(2)
    begins = [model[2 * number] for number in range(1, dist.get_world_size())]
    run = captured.load(pipeline=offload.Pipeline(begins=begins))
    before = {name: one.clone() for name, one in model.named_parameters()}
    stepped(run, *twin.batch(2, 3))
    changed = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    return sorted({name.split(".")[0] for name in changed})


@ending
def killed() -> Any:
    """The last rank ends between two steps."""
    twin = Twin(mlp(), OPTIMIZERS["sgd"])
    run = twin.captured(4).load(pipeline=offload.Pipeline())
    stepped(run, *twin.batch(4, 1))
    if run.is_last:
        end_here()
    return told(lambda: [stepped(run, *twin.batch(4, 1)) for _ in range(100)])


@ending
def failing_in_the_middle() -> Any:
    """The second micro-batch of the second step fails on the first rank; it calls again."""
    twin = Twin(gpt(), OPTIMIZERS["sgd"])
    run = twin.captured(2).load(pipeline=offload.Pipeline())
    xs, targets = twin.batch(2, 1)
    beyond = torch.stack([xs[0], xs[1] + 11])
    return [told(lambda given=given: stepped(run, given, targets)) for given in (xs, beyond, xs)]


@ending
def hung() -> Any:
    """The last rank does not call."""
    twin = Twin(mlp(), OPTIMIZERS["sgd"])
    run = twin.captured(4).load(pipeline=offload.Pipeline())
    stepped(run, *twin.batch(4, 1))
    store = dist.distributed_c10d._get_default_store()
    if run.is_last:
        store.wait(["told"], timedelta(seconds=120))
        return None
    found = told(lambda: stepped(run, *twin.batch(4, 1)))
    store.set("told", "")
    return found


def begin() -> None:
    """Meet the other ranks."""
    is_ending = not ENDING.keys().isdisjoint(sys.argv)
    timeout_s = SHORT_TIMEOUT_S if is_ending else TIMEOUT_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


if __name__ == "__main__":
    main(CASES | ENDING if len(sys.argv) > 2 else CASES, begin, lambda: None)
