"""Claim: launches between collectives run no Python, so that ranks wait for gloo alone.

Each test starts ranks by `torchrun`, in which calls are timed in turns: all ranks draw the same
order. The floor, gloo alone, is the same collectives on the same sizes, by torch's own calls with
nothing between them.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

import offload
from measurements import Case, counted_figure, figure_of, ratio_of

OURS, EAGER, FLOOR = "offload", "eager", "gloo alone"
OVERLAPPED = "offload, collectives beside launches"
ROUNDS = 60

Times = dict[str, list[float]]


# ---- the work of a rank --------------------------------------------------------------------------


def turns_of_ranks(contenders: dict[str, Callable[[], Any]], n_calls: int) -> Times:
    """As `take_turns`, in the same order and equally often on all ranks."""
    times: Times = {name: [] for name in contenders}
    order = torch.Generator().manual_seed(0)
    names = sorted(contenders)
    for _ in range(ROUNDS):
        for at in torch.randperm(len(names), generator=order).tolist():
            function = contenders[names[at]]
            function()
            begin = time.perf_counter_ns()
            for _ in range(n_calls):
                function()
            times[names[at]].append((time.perf_counter_ns() - begin) / n_calls)
    return times


class Feedforward(nn.Module):
    """Two layers, between which a model is split."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widen, and narrow again."""
        return self.down(torch.relu(self.up(x)))


def split(n_layers: int, size: int) -> nn.Module:
    """Layers whose first half is split by columns and whose second half by rows."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    layers = nn.Sequential(*(Feedforward(size) for _ in range(n_layers)))
    for layer in layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return layers.eval().requires_grad_(False)


def of_split_model(n_layers: int, size: int, n_calls: int) -> Times:
    model, x = split(n_layers, size), torch.randn(4, size)
    run = offload.capture(model, x).load()
    assert torch.equal(run(x), model(x))
    reduced = torch.randn(4, size)

    def floor() -> None:
        for _ in range(n_layers):
            dist.all_reduce(reduced)
        reduced.zero_()

    def eager() -> torch.Tensor:
        """Call until the result is complete: DTensor's is waited for at its first use."""
        result = model(x)
        return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result

    contenders = {OURS: lambda: run(x), EAGER: eager}
    if dist.get_world_size() > 1:
        contenders[FLOOR] = floor
    return turns_of_ranks(contenders, n_calls)


def alone() -> Times:
    return of_split_model(1, 16, 50)


def tensor_parallel() -> Times:
    return of_split_model(1, 64, 10)


def tensor_parallel_deep() -> Times:
    return of_split_model(8, 64, 4)


def pipeline() -> Times:
    torch.manual_seed(0)
    rank, cpu = dist.get_rank(), torch.device("cpu")
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
    stage = nn.Sequential(*layers).eval().requires_grad_(False)

    class CapturedStage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.run = offload.capture(stage, torch.randn(4, 64)).load()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    x = torch.randn(16, 64)
    made = {OURS: CapturedStage(), EAGER: stage}
    schedules = {
        name: ScheduleGPipe(PipelineStage(one, rank, 2, cpu), 4) for name, one in made.items()
    }
    return turns_of_ranks(
        {
            name: (lambda one=one: one.step(x) if rank == 0 else one.step())
            for name, one in schedules.items()
        },
        3,
    )


def in_stages() -> Times:
    """A model that is cut in stages, against halves of its layers under torch's schedule."""
    torch.manual_seed(0)
    rank, cpu = dist.get_rank(), torch.device("cpu")
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers).eval().requires_grad_(False)
    x = torch.randn(256, 256)
    micro_batches = list(x.chunk(4))
    run = offload.capture(model, micro_batches[0]).load(pipeline=offload.Pipeline(4))
    half = model[:16] if rank == 0 else model[16:]
    schedule = ScheduleGPipe(PipelineStage(half, rank, 2, cpu), 4)
    if rank == 0:
        print(run.explain())
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: run(micro_batches) if rank == 0 else run(),
        EAGER: lambda: schedule.step(x) if rank == 0 else schedule.step(),
    }
    results = [contender() for contender in contenders.values()]
    assert rank == 0 or torch.equal(torch.cat(results[0]), results[1])
    return turns_of_ranks(contenders, 3)


def training_in_stages() -> Times:
    """A training step in stages, against halves of its layers under torch's 1F1B."""
    torch.manual_seed(0)
    rank, cpu, n_micro_batches = dist.get_rank(), torch.device("cpu"), 8
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers)
    half = copy.deepcopy(model[:16] if rank == 0 else model[16:])
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=1e-3) for one in (model, half))
    xs, targets = torch.randn(2, n_micro_batches, 64, 256)

    def step(xs: torch.Tensor, targets: torch.Tensor) -> Any:
        loss: Any = 0
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            one = mse_loss(model(x), target) / n_micro_batches
            one.backward()
            loss += one.detach()
        ours.step()
        ours.zero_grad(set_to_none=False)
        return loss

    # The capture takes the first step of a training, so both sides take one here.
    captured = offload.capture(step, xs, targets, training=True)
    run = captured.load(pipeline=offload.Pipeline(n_micro_batches, begins=[model[16]]))
    schedule = Schedule1F1B(PipelineStage(half, rank, 2, cpu), n_micro_batches, loss_fn=mse_loss)
    if rank == 0:
        print(run.explain())

    def eager() -> None:
        if rank == 0:
            schedule.step(xs.flatten(0, 1))
        else:
            schedule.step(target=targets.flatten(0, 1))
        theirs.step()
        theirs.zero_grad(set_to_none=False)

    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: run(xs, targets) if rank == 0 else run(),
        EAGER: eager,
    }
    eager()
    for contender in contenders.values():
        contender()
    own = model[:16] if rank == 0 else model[16:]
    for one, other in zip(own.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    return turns_of_ranks(contenders, 2)


def overlapped() -> Times:
    """A step that reduces gradients while others are computed, and waits for them one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Feedforward(128) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        for one in model.parameters():
            dist.all_reduce(one.grad)
            one.grad /= dist.get_world_size()
        optimizer.step()
        return loss.detach()

    x = torch.randn(64, 128)
    captured = offload.capture(step, x, training=True)
    runs = {OURS: captured.load(), OVERLAPPED: captured.load(lanes=2)}
    if dist.get_rank() == 0:
        print(runs[OVERLAPPED].explain())
    contenders: dict[str, Callable[[], Any]] = {
        name: (lambda run=run: run(x)) for name, run in runs.items()
    }
    return turns_of_ranks({**contenders, EAGER: lambda: step(x)}, 3)


def growth() -> dict[str, float]:
    """Growth of resident bytes over 10,000 executions, after torch's own records are full."""
    model, x = split(1, 16), torch.randn(4, 16)
    run = offload.capture(model, x).load()

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    for _ in range(4000):
        run(x)
    before = resident_bytes()
    for _ in range(10_000):
        run(x)
    return {"grown_bytes": float(resident_bytes() - before)}


def ended() -> dict[str, float]:
    """Time from the kill of rank 1 until rank 0 knows."""
    run = offload.capture(split(1, 16), torch.randn(4, 16)).load()
    x = torch.randn(4, 16)
    store = dist.distributed_c10d._get_default_store()
    for _ in range(100):
        run(x)
    if dist.get_rank() == 1:
        store.set("ended_at", str(time.time()))
        os.kill(os.getpid(), 9)
    try:
        while True:
            run(x)
    except offload.ExecutionError:
        return {"known_after_s": time.time() - float(store.get("ended_at"))}


def hung() -> dict[str, float]:
    """Time from its group's timeout until rank 0 knows that rank 1 does not come."""
    timeout_s = 2.0
    group = dist.new_group([0, 1], timeout=timedelta(seconds=timeout_s))
    x = torch.randn(4, 16)
    run = offload.capture(lambda x: functional.all_reduce(x, "sum", group) + 1, x).load()
    run(x)
    if dist.get_rank() == 1:
        time.sleep(2 * timeout_s + 1)
        return {}
    begin = time.perf_counter()
    try:
        run(x)
    except offload.ExecutionError:
        return {"known_after_s": time.perf_counter() - begin - timeout_s}
    raise AssertionError("rank 1 has not come")


RUNS = {
    one.__name__: one
    for one in (
        alone,
        tensor_parallel,
        tensor_parallel_deep,
        pipeline,
        in_stages,
        training_in_stages,
        overlapped,
        growth,
        ended,
        hung,
    )
}


def main(name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = RUNS[name]()
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    if name != "ended":
        dist.destroy_process_group()


# ---- the measurements ----------------------------------------------------------------------------


def ranks(name: str, n_ranks: int) -> list[dict[str, Any]]:
    """The results of each surviving rank."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).parent)
        done = subprocess.run(
            [sys.executable, *launcher, __file__, name, folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        found = [json.loads(one.read_text()) for one in sorted(Path(folder).glob("*.json"))]
        assert found, done.stderr[-3000:]
        return found


MODELS = {
    "alone": ("1 rank: DTensor feedforward, width 16", 1, 20.0),
    "tensor_parallel": ("2 ranks: DTensor feedforward, width 64", 2, 1.0),
    "tensor_parallel_deep": ("2 ranks: 8 DTensor feedforwards, width 64", 2, 1.0),
    "in_stages": ("2 ranks: a model in stages, 4 microbatches, 16 × (Linear 256, ReLU)", 2, 1.0),
    "training_in_stages": (
        "2 ranks: a training step in stages (1F1B), 8 microbatches, 16 × (Linear 256, ReLU), SGD",
        2,
        1.0,
    ),
    "overlapped": ("2 ranks: data-parallel SGD step, 4 feedforwards, width 128", 2, 1.0),
    "pipeline": ("2 ranks: GPipe, 4 microbatches, 8 × (Linear 64, ReLU) a stage", 2, 1.0),
}


@pytest.mark.parametrize("name", MODELS)
def test_ranks(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    title, n_ranks, at_least = MODELS[name]
    times = ranks(name, n_ranks)[-1]  # in a pipeline the last stage has the result
    ratios = {EAGER: ratio_of(times[EAGER], times[OURS], at_least=at_least)}
    figures = {one: figure_of(times[one], "ns") for one in times}
    if FLOOR in times:
        floor_ns = figures[FLOOR].value
        for one in (OURS, EAGER):
            beyond = [time_ns - floor_ns for time_ns in times[one]]
            figures[f"{one}, beyond {FLOOR}"] = figure_of(beyond, "ns")
    record(Case(title, ratios=ratios, figures=figures))
    benchmark.pedantic(lambda: None, rounds=1)


def test_growth(benchmark: Any, record: Callable[[Case], None]) -> None:
    found = [one["grown_bytes"] for one in ranks("growth", 2)]
    record(
        Case(
            "2 ranks: resident bytes more after 10,000 executions",
            figures={f"rank {rank}": counted_figure(one, "B") for rank, one in enumerate(found)},
        )
    )
    benchmark.pedantic(lambda: None, rounds=1)
    assert max(found) < 2**20  # each result alone would be 256 bytes an execution, 2.5 MB


def test_a_rank_that_ends(benchmark: Any, record: Callable[[Case], None]) -> None:
    times = [ranks("ended", 2)[0]["known_after_s"] for _ in range(3)]
    record(
        Case(
            "2 ranks: from the end of one to the ExecutionError on the other",
            figures={OURS: figure_of(times, "s")},
        )
    )
    benchmark.pedantic(lambda: None, rounds=1)
    assert max(times) < 1


def test_a_rank_that_hangs(benchmark: Any, record: Callable[[Case], None]) -> None:
    times = [ranks("hung", 2)[0]["known_after_s"] for _ in range(3)]
    record(
        Case(
            "2 ranks: from the end of the group's timeout to the ExecutionError",
            figures={OURS: figure_of(times, "s")},
        )
    )
    benchmark.pedantic(lambda: None, rounds=1)
    assert max(times) < 1


if __name__ == "__main__":
    main(*sys.argv[1:])
