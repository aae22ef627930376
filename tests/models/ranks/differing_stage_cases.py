"""Cases of ranks whose stages of a training step, or what they hold of it, differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import main
from staged_training import OPTIMIZERS, ROWS, SIZE, MakeOptimizer, Twin, gpt, mlp, stepped, told
from torch import nn
from training import same_bits
from training_stage_rank_cases import TIMEOUT_S

import offload

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


@case
def other_launches() -> Any:
    """Ranks with another optimizer, and with another learning rate."""
    rank = dist.get_rank()
    rates: MakeOptimizer = lambda of: torch.optim.SGD(of, lr=0.1 + rank, foreach=False)  # noqa: E731
    of_rank = ("sgd", "adamw")[min(rank, 1)]
    found = []
    for optimizer in (OPTIMIZERS[of_rank], rates):
        captured = Twin(mlp(), optimizer).captured(2)
        found.append(told(lambda captured=captured: captured.load(pipeline=offload.Pipeline())))
    return found


@case
def refused_on_one_rank() -> Any:
    """The last rank asks for what is refused there: the others do not wait for the timeout."""
    captured = Twin(mlp(), OPTIMIZERS["sgd"]).captured(2)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    schedule = "2F2B" if is_last else "1F1B"
    begun_s = time.monotonic()
    found = told(lambda: captured.load(pipeline=offload.Pipeline(schedule=schedule)))
    return *found, time.monotonic() - begun_s < TIMEOUT_S / 2


@case
def refused_in_a_part() -> Any:
    """A refusal in a group of the first two ranks is none for all ranks, which load later."""
    group = dist.new_group([0, 1])
    captured = Twin(mlp(), OPTIMIZERS["sgd"]).captured(2)
    found = []
    for at, schedule in enumerate(("2F2B", "1F1B")):
        if dist.get_rank() < 2:
            asked = schedule if dist.get_rank() == 0 else "1F1B"
            pipeline = offload.Pipeline(group=group, schedule=asked)
            found.append(told(lambda pipeline=pipeline: captured.load(pipeline=pipeline))[0])
        dist.barrier()
        asked = "1F1B" if at or dist.get_rank() else "2F2B"
        pipeline = offload.Pipeline(schedule=asked)
        found.append(told(lambda pipeline=pipeline: captured.load(pipeline=pipeline))[0])
    return found


@case
def other_weights() -> Any:
    """Ranks begin with weights of other seeds, other random numbers, other batches."""
    rank, found = dist.get_rank(), {}
    torch.manual_seed(rank)
    unseeded = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4)))
    twins = {
        "seeds": Twin(unseeded, OPTIMIZERS["sgd"]),
        "draws": Twin(gpt(p=0.3), OPTIMIZERS["sgd"]),
    }
    twins["batches"] = Twin(mlp(), OPTIMIZERS["adamw"])
    for name, twin in twins.items():
        torch.manual_seed(rank if name == "draws" else 1)
        batch = twin.batch(2, rank if name == "batches" else 0)
        captured = offload.capture(twin.step, *batch, training=True)
        found[name] = told(lambda captured=captured: captured.load(pipeline=offload.Pipeline()))
    evaluated = offload.capture(unseeded.eval().requires_grad_(False), torch.ones(ROWS, SIZE))
    found["evaluated"] = told(lambda: evaluated.load(pipeline=offload.Pipeline(2)))
    return found


@case
def other_stages() -> Any:
    """Two ranks: two steps of one model whose stages differ, and its evaluation, in turns."""
    alone, ours = (Twin(mlp(), OPTIMIZERS["adamw, foreach"]) for _ in range(2))
    model: Any = ours.model
    model.eval()
    evaluation = offload.capture(model, torch.ones(ROWS, SIZE))
    model.train()
    sizes = (2, 3)
    expected = [alone.captured(one).load() for one in sizes]
    captured = [ours.captured(one) for one in sizes]
    begins = (model[2], model[6])
    runs = [
        of.load(pipeline=offload.Pipeline(begins=[begin]))
        for of, begin in zip(captured, begins, strict=True)
    ]
    staged = evaluation.load(pipeline=offload.Pipeline(2))
    found = {"refused": []}
    stepped(runs[1], *ours.batch(3, 0))
    expected[1](*ours.batch(3, 0))
    for at in (0, 1, 0):
        batch = ours.batch(sizes[at], 1 + at)
        found["refused"].append(told(lambda at=at, batch=batch: stepped(runs[at], *batch)))
        runs[1 - at].gather_state()
        stepped(runs[at], *batch)
        expected[at](*batch)
    runs[1].gather_state()  # finds what the other has written
    theirs = dict(alone.state())
    found["wrong"] = [name for name, one in ours.state() if not same_bits(one, theirs[name])]
    stepped(runs[0], *ours.batch(2, 7))
    expected[0](*ours.batch(2, 7))
    model.eval()
    micro_batches = [*ours.batch(2, 9)[0]]
    given = [micro_batches] if staged.number == 0 else []
    with torch.no_grad():
        found["evaluated"] = told(lambda: staged(*given))
        runs[0].gather_state()
        results = staged(*given)
        wanted = [alone.model(one) for one in micro_batches]
    found["results"] = staged.is_last and all(map(torch.equal, results, wanted))
    return found


if __name__ == "__main__":
    main(
        CASES,
        lambda: dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S)),
        lambda: None,
    )
