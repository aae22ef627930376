"""The padding of inputs: a number for each input whose sizes vary, which its dtype can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import BindingError
from offload.interpreter.torch_names import find_dtype
from offload.program.family import Family
from offload.program.structure import Structure
from offload.program.varying_numbers import varying_of, varying_program


def input_names(family: Family) -> dict[int, str]:
    """Return, by input, the name of the parameter that it is given as, or is part of."""
    program = varying_program(family)
    positional, keyword = program.arguments_structure.children
    names: dict[int, str] = {}
    for position, child in enumerate(positional.children):
        parameters = program.parameter_names
        name = parameters[position] if position < len(parameters) else ""
        names |= dict.fromkeys(_leaves(child), name or f"args[{position}]")
    for key, child in zip(keyword.keys, keyword.children, strict=True):
        names |= dict.fromkeys(_leaves(child), str(key))
    return names


def pad_values(family: Family, pad: Mapping[str, float]) -> list[float]:
    """Return the padding value of each input; 0 where its sizes do not vary.

    Raises:
        BindingError: an input that varies has no value, or a value matches no input.
    """
    program, names = varying_program(family), input_names(family)
    if unknown := set(pad).difference(names.values()):
        raise BindingError(
            f"sizes.pad: expected values for {', '.join(dict.fromkeys(names.values()))}, got one "
            f"for {min(unknown)}"
        )
    values = []
    for leaf, view in enumerate(program.inputs):
        if any(position < len(view.shape) for position, _ in varying_of(view)):
            if names[leaf] not in pad:
                raise BindingError(
                    f"sizes.pad: expected a value for {names[leaf]}, whose sizes vary"
                )
            _check_value(names[leaf], pad[names[leaf]], view.dtype)
            values.append(pad[names[leaf]])
        else:
            values.append(0)
    return values


def _check_value(name: str, value: Any, dtype: str) -> None:
    """Refuse a value that tensors of a dtype cannot have.

    Raises:
        BindingError: the value is not a number, or changes in that dtype, as 0.5 does among
            integers.
    """
    try:
        held = torch.full((), value, dtype=find_dtype(dtype)).item()
    except (TypeError, RuntimeError):
        held = None
    is_rounded = find_dtype(dtype).is_floating_point or find_dtype(dtype).is_complex
    if held is None or not (is_rounded or held == value):
        raise BindingError(f"sizes.pad[{name!r}]: expected a number of {dtype}, got {value!r}")


def _leaves(structure: Structure) -> list[int]:
    if structure.kind == "tensor":
        return [structure.leaf]
    return [leaf for child in structure.children for leaf in _leaves(child)]
