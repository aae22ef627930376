"""Files of Programs whose ranks exchange tensors: one per rank, distinguished by name."""

from __future__ import annotations

from pathlib import Path

from offload.distributed import world
from offload.errors import FileError
from offload.program import Program


def path_of_rank(path: Path, program: Program) -> Path:
    """The path that a Program is written to: with several ranks, the rank follows the name."""
    for group in program.groups:
        return _path(path, group.rank, group.world_size)
    return path


def own_path(path: Path) -> Path:
    """The file to read: the path, or this rank's file if each rank has written one.

    Raises:
        FileError: there are files of ranks, but none of this rank in a world of this size.
    """
    if path.exists():
        return path
    others = sorted(one.name for one in path.parent.glob(f"{path.name}.rank*of*"))
    if not others:
        return path
    rank, size = world()
    own = _path(path, rank, size)
    if not own.exists():
        raise FileError(
            f"{path}: it was saved by ranks that exchange tensors ({', '.join(others)}), and this "
            f"is rank {rank} of {size}: start as many (torchrun --nproc-per-node), and call "
            "torch.distributed.init_process_group before it is opened"
        )
    return own


def _path(path: Path, rank: int, world_size: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}of{world_size}")
