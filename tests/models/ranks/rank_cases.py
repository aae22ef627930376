"""Cases of two ranks; each returns data that can be written as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from ranks import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import offload

TIMEOUT_S = 20
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


def own(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of this rank alone."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(dtype)


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
def gathered_coalesced_of_two_dtypes() -> Any:
    gather = torch.ops._c10d_functional.all_gather_into_tensor_coalesced
    wait = torch.ops._c10d_functional.wait_tensor

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        return [wait(one) + 1 for one in gather([x, (x * 9).long()], 2, WORLD)]

    return check(call, (3, 2))


@case
def overlapped() -> Any:
    """A collective is started, other values are computed, and the result is waited for."""

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


# ---- models of several ranks ---------------------------------------------------------------------


class Feedforward(nn.Module):
    """Two layers, the first split by columns and the second by rows."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    """Attention whose heads are split over the ranks."""

    def __init__(self, size: int, n_heads: int) -> None:
        super().__init__()
        self.head = size // n_heads
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.project = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            one(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """A layer of a GPT."""

    def __init__(self, size: int, n_heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(size, n_heads)
        self.feedforward = Feedforward(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feedforward(self.second(x))


TENSOR_PARALLEL = {
    "feedforward.up": ColwiseParallel(),
    "feedforward.down": RowwiseParallel(),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.project": RowwiseParallel(),
}


def alike(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


@case
def tensor_parallel_feedforward() -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(
        Feedforward(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    return check_model(model, 4, 16)


@case
def tensor_parallel_gpt() -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layers = nn.Sequential(*(DecoderLayer(32, 4) for _ in range(2)))
    for layer in layers:
        parallelize_module(layer, mesh, TENSOR_PARALLEL)
    return check_model(layers, 2, 8, 32)


@case
def sequence_parallel() -> Any:
    """Rows of the sequence are split before the first layer gathers them."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(16), Feedforward())
    plan = {
        "0": SequenceParallel(),
        "1.up": ColwiseParallel(input_layouts=Shard(1)),
        "1.down": RowwiseParallel(output_layouts=Replicate()),
    }
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    model = parallelize_module(model, mesh, plan)
    model = parallelize_module(model, mesh, prepared)
    return check_model(model, 2, 8, 16)


@case
def distributed_tensors_are_no_arguments() -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    given = distribute_tensor(alike(4, 4), mesh, [Shard(0)])

    def told(function: Callable[..., Any], x: torch.Tensor) -> str:
        try:
            offload.capture(function, x)
        except offload.CaptureError as error:
            return str(error)
        return ""

    return [
        told(torch.relu, given),
        told(lambda x: distribute_tensor(x, mesh, [Replicate()]), alike(4, 4)),
    ]


@case
def wrapped_models_are_refused() -> Any:
    found = []
    for wrap in (DistributedDataParallel, fully_shard):
        model = wrap(Feedforward())
        for function in (model, lambda x, model=model: model(x)):
            try:
                offload.capture(function, alike(2, 16))
            except offload.CaptureError as error:
                found.append(str(error))
    return found


# ---- data parallel training ----------------------------------------------------------------------


def averaged_functionally(model: nn.Module) -> None:
    """Each gradient is that of the whole batch."""
    for one in model.parameters():
        total = functional.all_reduce(one.grad, "sum", dist.group.WORLD)
        one.grad.copy_(total / dist.get_world_size())


def averaged_in_place(model: nn.Module) -> None:
    """The same by collectives that write the gradients, all in flight at once."""
    works = [dist.all_reduce(one.grad, async_op=True) for one in model.parameters()]
    for work in works:
        work.wait()
    for one in model.parameters():
        one.grad /= dist.get_world_size()


def data_parallel(average: Callable[[nn.Module], None], optimizer_of: Any) -> dict[str, Any]:
    """Recorded steps of a replicated model, compared with eager bit for bit."""
    torch.manual_seed(3)
    models = [Feedforward(8) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optimizer_of(one.parameters()) for one in models]

    def step_of(number: int) -> Callable[..., torch.Tensor]:
        model, optimizer = models[number], optimizers[number]

        def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(model(x), target)
            loss.backward()
            average(model)
            optimizer.step()
            return loss.detach()

        return step

    captured = offload.capture(step_of(0), own(4, 8), own(4, 8, seed=1), training=True)
    runs = [captured.load(), captured.load(lanes=2), captured.load(lanes="auto")]
    eager = step_of(1)
    eager(own(4, 8), own(4, 8, seed=1))
    same = []
    for seed in range(2, 12):
        given = own(4, 8, seed=seed), own(4, 8, seed=seed + 50)
        same.append(torch.equal(runs[seed % 3](*given), eager(*given)))
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        same += [torch.equal(one, other) for one, other in pairs]
    names = [launch.name.partition("::")[2] for launch in captured.program.launches]
    return {"same": all(same), "n": len(same), "reduced": sum("all_reduce" in one for one in names)}


@case
def data_parallel_functional() -> Any:
    return data_parallel(averaged_functionally, lambda given: torch.optim.SGD(given, lr=0.1))


@case
def data_parallel_in_place() -> Any:
    return data_parallel(
        averaged_in_place, lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True)
    )


@case
def gradients_through_collectives() -> Any:
    """A step whose loss follows a collective, through which autograd goes back."""
    torch.manual_seed(3)
    models = [nn.Linear(8, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            whole = functional.all_gather_single(model(x), 0, dist.group.WORLD)
            loss = whole.square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    captured = offload.capture(step_of(models[0]), own(3, 8), training=True)
    eager = step_of(models[1])
    eager(own(3, 8))
    same = [
        torch.equal(captured(own(3, 8, seed=seed)), eager(own(3, 8, seed=seed)))
        for seed in range(2, 8)
    ]
    same.append(torch.equal(models[0].weight, models[1].weight))
    names = [launch.name.partition("::")[2] for launch in captured.program.launches]
    return {"same": all(same), "launches": names}


# ---- pipelines -----------------------------------------------------------------------------------


class CapturedStage(nn.Module):
    """A stage of a pipeline whose calls are executions."""

    def __init__(self, stage: nn.Module, example: torch.Tensor) -> None:
        super().__init__()
        self.run = offload.capture(stage, example).load()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


@case
def captured_stages_of_a_pipeline() -> Any:
    torch.manual_seed(0)
    rank, cpu = dist.get_rank(), torch.device("cpu")
    stages = [Feedforward().eval().requires_grad_(False) for _ in range(2)]
    captured = CapturedStage(stages[rank], alike(2, 16))
    same = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        for seed in range(3):
            x = alike(8, 16, seed=seed)
            stage = PipelineStage(captured, rank, 2, cpu)
            whole = schedule(stage, 4, loss_fn=None)
            if schedule is Schedule1F1B:
                result = whole.eval(x) if rank == 0 else whole.eval()
            else:
                result = whole.step(x) if rank == 0 else whole.step()
            parts = [stages[1](stages[0](part)) for part in x.chunk(4)]
            same.append(rank == 0 or torch.equal(result, torch.cat(parts)))
    return same


# ---- files ---------------------------------------------------------------------------------------


@case
def saved_by_rank() -> Any:
    """Each rank finds its own file and its groups by name, and another group where one is given."""
    path = Path(os.environ["RANKS_FOLDER"]) / "summed.offload"
    model = nn.Linear(4, 4).requires_grad_(False)

    def call(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(model(x), "sum", dist.group.WORLD)

    captured = offload.capture(call, own(2, 4))
    captured.save(path)
    opened = offload.open(path)
    x = own(2, 4, seed=9)
    expected = call(x)
    other = dist.new_group([0, 1])
    results = [opened.load()(x), opened.load(groups={"0": other})(x)]
    wrong = {}
    for name, given in {"unknown": {"7": other}, "no group": {"0": 5}}.items():
        try:
            opened.load(groups=given)
        except offload.BindingError as error:
            wrong[name] = str(error)
    return {
        "files": sorted(one.name for one in path.parent.glob("summed*")),
        "same": [torch.equal(one, expected) for one in results],
        "groups": [str(one) for one in opened.program.groups],
        "wrong": wrong,
    }


def begin() -> None:
    """Meet the other ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))


if __name__ == "__main__":
    main(CASES, begin, dist.destroy_process_group)
