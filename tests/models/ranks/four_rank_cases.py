"""Cases of four ranks: two groups of two hold parts of a model, each for a part of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_checks import (
    Feedforward,
    alike,
    all_gather_single,
    begin,
    check,
    check_model,
    reduce_scatter_single,
)
from ranks import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offload


def split_both_ways() -> Any:
    """A model split over two ranks, whose result two other ranks average."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        Feedforward(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.group = mesh.get_group("dp").group_name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.model(x + mesh.get_local_rank("dp"))
            return functional.all_reduce(y, "sum", self.group) / 2

    found = check_model(Averaged(), 4, 16)
    return {**found, "rank": dist.get_rank()}


def collectives_of_four() -> Any:
    """Sums whose order of adding matters to the last bit."""
    world = dist.group.WORLD
    return [
        check(lambda x: functional.all_reduce(x.exp(), "sum", world) * 3, (33,)),
        check(lambda x: reduce_scatter_single(x.exp(), "sum", 0, world), (8, 5)),
        check(lambda x: all_gather_single(x, 0, world) + 1, (2, 3)),
    ]


def groups_of_a_program() -> Any:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[dist.get_rank() % 2]
    captured = offload.capture(lambda x: functional.all_reduce(x, "sum", group), alike(3))
    (found,) = captured.program.groups
    return [list(found.ranks), found.rank, found.world_size]


CASES = {one.__name__: one for one in (split_both_ways, collectives_of_four, groups_of_a_program)}

if __name__ == "__main__":
    main(CASES, begin, dist.destroy_process_group)
