"""Inputs and results of programs in safetensors files."""

from __future__ import annotations

from pathlib import Path

import safetensors
import safetensors.torch
import torch

from offload.errors import FileError
from offload.program import Program


def _input_names(program: Program) -> list[str]:
    """The names of the inputs for users: the parameter's name, or the place in the arguments."""
    names = [program.values[view.value].name for view in program.inputs]
    positional, keyword = program.arguments_structure.children
    for child, name in zip(positional.children, program.parameter_names, strict=False):
        if child.kind == "tensor":
            names[child.leaf] = name
    for child, key in zip(keyword.children, keyword.keys, strict=True):
        if child.kind == "tensor":
            names[child.leaf] = key
    return names


def inputs_of(program: Program, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Pick a program's inputs from named tensors, in the program's order.

    The names are those of the parameters, those that reports and errors show (`args[0]`), or
    input0, input1 and so on in order.

    Raises:
        FileError: the names are others; the message lists the expected ones.
    """
    names = _input_names(program)
    places = [program.values[view.value].name for view in program.inputs]
    in_order = [f"input{index}" for index in range(len(names))]
    for candidates in (names, places, in_order):
        if set(given) == set(candidates) and len(given) == len(names):
            return [given[name] for name in candidates]
    expected = [
        f"{name} (or {fallback}) {view.dtype}{list(view.shape)}"
        for name, fallback, view in zip(names, in_order, program.inputs, strict=True)
    ]
    raise FileError(
        f"expected as inputs {', '.join(expected) or 'no tensors'}; "
        f"got {', '.join(sorted(given)) or 'no tensors'}"
    )


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file.

    Raises:
        FileError: the file cannot be read as safetensors.
    """
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise FileError(f"{path}: cannot be read as safetensors: {error}") from error


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, completely or not at all.

    Raises:
        FileError: safetensors lacks a dtype, or the path cannot be written to.
    """
    # safetensors refuses tensors that share memory or have gaps.
    plain = {name: one.contiguous().clone().resolve_conj() for name, one in tensors.items()}
    temporary = path.with_name(f".{path.name}.part")
    try:
        safetensors.torch.save_file(plain, temporary)
        temporary.replace(path)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise FileError(f"{path}: the results cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
