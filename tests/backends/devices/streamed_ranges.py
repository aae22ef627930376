"""The bytes of weights that executables stream, and changes of their files."""

from __future__ import annotations

import safetensors.torch
import torch

PAGE = 4096


def streamed_ranges(run) -> dict[str, tuple[int, int]]:
    """For each streamed weight the range of bytes that its transfer copies."""
    pieces = [run.streaming.plan.pieces[one.piece] for one in run.streaming.plan.transfers]
    return {
        run.bound.bindings.stored[one.value].name: (
            one.offset_bytes,
            one.offset_bytes + one.size_bytes,
        )
        for one in pieces
    }


def union_bytes(*runs) -> int:
    """The union of all streamed bytes; a weight is streamed from some offset to its end."""
    ranges = [streamed_ranges(run) for run in runs]
    names = {name for one in ranges for name in one}
    found = [[one[name] for one in ranges if name in one] for name in names]
    return sum(max(end for _, end in one) - min(begin for begin, _ in one) for one in found)


def changed(path, factor: float = 2.0) -> None:
    """Rewrite a file in place."""
    content = {name: one * factor for name, one in safetensors.torch.load_file(path).items()}
    with path.open("r+b") as file:
        file.write(safetensors.torch.save(content))


def settled(run, given, device) -> torch.Tensor:
    found = run(given)
    device.settle(run)
    return found
