"""Commands under `torchrun`: the ranks meet before the command begins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from offload.distributed import world


@contextlib.contextmanager
def ranks_met() -> Iterator[None]:
    """Create the world's process group for the command, if this is one of several ranks.

    `torchrun` says so in the environment (RANK, WORLD_SIZE). On the CPU the groups use gloo.
    """
    if not is_started_as_rank() or world() != (0, 1):
        yield
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def is_started_as_rank() -> bool:
    """Whether a launcher of several ranks started this process."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys() and torch.distributed.is_available()


def of_this_rank(path: Path) -> Path:
    """The file that each rank writes: with several ranks, the rank follows the name."""
    rank, size = world()
    return path if size == 1 else path.with_name(f"{path.name}.rank{rank}of{size}")


def ranks_text() -> str:
    """The line of `offload doctor`: whether there are process groups, and which rank this is."""
    if not torch.distributed.is_available():
        return "(this torch has no torch.distributed)"
    if not torch.distributed.is_gloo_available():
        return "(this torch has no gloo, over which programs on the CPU exchange tensors)"
    if not is_started_as_rank():
        return "gloo; one process (torchrun --nproc-per-node 2 -m offload ... starts two ranks)"
    return f"gloo; rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
