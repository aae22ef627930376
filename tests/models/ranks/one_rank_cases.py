"""Cases of a world of one rank: nothing is sent, and everything is recorded as with more ranks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_checks import Feedforward, alike, begin, check_model
from ranks import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offload


def split_alone() -> Any:
    mesh = init_device_mesh("cpu", (1,))
    model = parallelize_module(
        Feedforward(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    return check_model(model, 4, 16)


def weights_in_files() -> Any:
    """Recording computes nothing and meets no other rank."""
    path = Path(os.environ["RANKS_FOLDER"]) / "model.safetensors"
    model = nn.Linear(16, 16).requires_grad_(False)
    safetensors.torch.save_file(model.state_dict(), path)

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = model.weight, model.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.all_reduce(nn.functional.linear(x, self.weight, self.bias), "sum", "0")
            return y * 2

    captured = offload.capture(Summed(), alike(2, 16), weights=path)
    with torch.no_grad():
        return torch.equal(captured(alike(2, 16, seed=1)), model(alike(2, 16, seed=1)) * 2)


def another_world() -> Any:
    """A program recorded by two ranks is not loaded by one rank."""
    captured = offload.capture(lambda x: functional.all_reduce(x, "sum", "0"), alike(3))
    (group,) = captured.program.groups
    found = []
    for other in (
        {"ranks": (0, 1), "world_size": 2},
        {"name": "7"},
    ):
        changed = dataclasses.replace(group, **other)
        launches = [
            dataclasses.replace(one, arguments=(*one.arguments[:-1], changed.name))
            if not one.waits
            else one
            for one in captured.program.launches
        ]
        program = dataclasses.replace(captured.program, groups=(changed,), launches=tuple(launches))
        bound = dataclasses.replace(captured.bound, program=program)
        try:
            offload.Captured(bound).load()
        except offload.BindingError as error:
            found.append(str(error))
    return found


CASES = {one.__name__: one for one in (split_alone, weights_in_files, another_world)}

if __name__ == "__main__":
    main(CASES, begin, dist.destroy_process_group)
