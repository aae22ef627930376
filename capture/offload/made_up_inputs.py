"""Inputs for executions that nobody asked for: valid for any model, and of no meaning."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.eager_run import EagerRun
from offload.program import ITEM_BYTES, Program
from offload.torch_names import find_dtype


def made_up_inputs(program: Program, variant: int, integer: int = 0) -> list[bytes]:
    """Bytes for each input that are valid for any model; variants differ where they can.

    Floating-point numbers are drawn from [0, 1), truth values likewise, and integers are all the
    same: 0 is an index into anything. Host constants are as they were recorded.
    """
    generator = torch.Generator().manual_seed(variant)
    contents = []
    for view in program.inputs:
        value = program.values[view.value]
        content = valid_bytes(value.dtype, view.end_bytes, generator, integer)
        contents.append(content if value.host_content is None else value.host_content)
    return contents


def valid_bytes(
    dtype_name: str, size_bytes: int, generator: torch.Generator, integer: int = 0
) -> bytes:
    """Content of this dtype that is valid for any model: see `made_up_inputs`."""
    dtype, n_items = find_dtype(dtype_name), size_bytes // ITEM_BYTES[dtype_name]
    if dtype.is_complex:
        numbers = torch.rand(n_items, 2, generator=generator, device="cpu")
        content = torch.view_as_complex(numbers).to(dtype)
    elif dtype is torch.bool:
        content = torch.rand(n_items, generator=generator, device="cpu") < 0.5
    elif dtype.is_floating_point:
        content = torch.rand(n_items, generator=generator, device="cpu").to(dtype)
    else:
        return integer.to_bytes(ITEM_BYTES[dtype_name], "little") * n_items
    return content.view(torch.uint8).numpy().tobytes() if n_items else b""


def overlapping_inputs(program: Program) -> list[list[tuple[int, int]]]:
    """The inputs in groups that overlap, each with its distance from the group's first in bytes."""
    groups = {leaf: [(leaf, 0)] for leaf in range(len(program.inputs))}
    for overlap in program.overlaps:
        one, other = groups[overlap.first], groups[overlap.second]
        if one is not other:
            shift = dict(one)[overlap.first] + overlap.distance_bytes - dict(other)[overlap.second]
            one += [(leaf, offset + shift) for leaf, offset in other]
            groups.update({leaf: one for leaf, _ in other})
    return list({id(group): group for group in groups.values()}.values())


def input_tensors(program: Program, contents: Sequence[bytes]) -> list[torch.Tensor]:
    """Tensors of the host that hold these bytes, those that must overlap on common memory."""
    bases: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for group in overlapping_inputs(program):
        lowest = min(offset for _, offset in group)
        end = max(offset - lowest + len(contents[leaf]) for leaf, offset in group)
        memory = torch.zeros(end, dtype=torch.uint8)
        for leaf, offset in group:
            begin, content = offset - lowest, bytearray(contents[leaf])
            if content:
                memory[begin : begin + len(content)] = torch.frombuffer(content, dtype=torch.uint8)
            bases[program.inputs[leaf].value] = (memory.untyped_storage(), begin)
    run = EagerRun(program, bases, fill=None)
    return [run.tensor(view) for view in program.inputs]
