"""Models of two ranks: split, trained on parts of a batch, in stages, and saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from rank_checks import Feedforward, alike, all_gather_single, begin, check_model, own
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

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


# ---- models that are split -----------------------------------------------------------------------


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
            whole = all_gather_single(model(x), 0, dist.group.WORLD)
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


if __name__ == "__main__":
    main(CASES, begin, dist.destroy_process_group)
