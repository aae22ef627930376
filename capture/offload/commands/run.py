"""`offload run`: a program, executed once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
import torch

from offload.backends import find_backend
from offload.commands.opening import load_file
from offload.commands.ranks import of_this_rank, ranks_met
from offload.console.text import printable
from offload.files.rank_paths import own_path
from offload.files.tensors import inputs_of, load_tensors, save_tensors
from offload.program.structure import flatten, unflatten
from offload.run import Executable


def run(
    file: Path,
    input_file: Path | None,
    output_file: Path | None,
    device: str | None,
    *,
    fuse: bool | Literal["auto"],
    triton: bool,
) -> None:
    """Execute a program once, with inputs from a file and results to another.

    Each of several ranks writes a separate file, and reads its own inputs if there are such.
    """
    with ranks_met():
        given = {} if input_file is None else load_tensors(own_path(input_file))
        with load_file(file, device, fuse=fuse, triton=triton) as executable:
            results = _results(executable, given)
            last, fusion = executable.last_execution, executable.fusion
        if output_file is not None:
            save_tensors(results, of_this_rank(output_file))
    for name, tensor in results.items():
        click.echo(f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
    click.echo(last)
    if fusion is not None:
        click.echo(printable(str(fusion)))


def _results(executable: Executable, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results of one execution, by name."""
    if not find_backend(executable.device).capabilities.computes:
        raise click.UsageError(
            f"device {executable.device!r} computes nothing: it only measures headers"
        )
    program = executable.program
    tensors = [one.to(program.device) for one in inputs_of(program, given)]
    args, kwargs = unflatten(executable.bound.arguments_structure, tensors)
    outcome = executable(*args, **kwargs)
    found, _ = flatten(outcome, lambda thing: isinstance(thing, torch.Tensor), share_same=True)
    return {f"result{index}": tensor for index, tensor in enumerate(found)}
