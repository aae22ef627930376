"""`offload run`: a program, executed once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
import torch

from offload.backends import find_backend
from offload.commands.opening import load_file
from offload.console.text import printable
from offload.files.tensors import inputs_of, load_tensors, save_tensors
from offload.program.structure import flatten, unflatten


def run(
    file: Path,
    input_file: Path | None,
    output_file: Path | None,
    device: str | None,
    *,
    fuse: bool | Literal["auto"],
) -> None:
    """Execute a program once, with inputs from a file and results to another."""
    given = {} if input_file is None else load_tensors(input_file)
    with load_file(file, device, fuse=fuse) as executable:
        if not find_backend(executable.device).capabilities.computes:
            raise click.UsageError(
                f"device {executable.device!r} computes nothing: it is there to measure headers"
            )
        program = executable.program
        tensors = [one.to(program.device) for one in inputs_of(program, given)]
        args, kwargs = unflatten(executable.bound.arguments_structure, tensors)
        outcome = executable(*args, **kwargs)
        last, fusion = executable.last_execution, executable.fusion
    found, _ = flatten(outcome, lambda thing: isinstance(thing, torch.Tensor), share_same=True)
    results = {f"result{index}": tensor for index, tensor in enumerate(found)}
    for name, tensor in results.items():
        click.echo(f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
    click.echo(last)
    if fusion is not None:
        click.echo(printable(str(fusion)))
    if output_file is not None:
        save_tensors(results, output_file)
