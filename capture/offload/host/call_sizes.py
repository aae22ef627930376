"""The sizes of a call, from its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.errors import BindingError
from offload.program import BoundProgram, Program
from offload.program.family import Family, SizePlace
from offload.program.structure import Structure

Step = tuple[str, Any]
_MISSING = object()


class CallSizes:
    """Finds the sizes of calls. Owner: one executable. Thread: any; it is immutable."""

    def __init__(self, family: Family) -> None:
        """Find the arguments that gave the recorded call's sizes."""
        self._family = family
        self._places = [(_path(family.program, one), one) for one in family.places]

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the sizes of a call in the order of the Dims, unchecked against the Family.

        Raises:
            BindingError: an argument that gives a size is missing or of another kind, or two
                arguments give different sizes of one Dim.
        """
        found: dict[int, tuple[int, str]] = {}
        for path, place in self._places:
            size, name = self._size(path, place, args, kwargs)
            known, first = found.setdefault(place.dim, (size, name))
            if known != size:
                raise BindingError(
                    f"{name} is {size}, and {first} is {known}: expected the same, as both are "
                    f"{self._family.names[place.dim]}"
                )
        return tuple(found[at][0] for at in range(len(found)))

    def _size(
        self, path: Sequence[Step], place: SizePlace, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[int, str]:
        argument = _found(path, args, kwargs)
        name = "".join(_shown(*step) for step in path)
        dim = self._family.names[place.dim]
        if place.constant >= 0:
            if type(argument) is not int:
                raise BindingError(
                    f"{name}: expected an integer, which is {dim}, got {_argument_text(argument)}"
                )
            return argument, name
        n_axes = len(self._family.program.inputs[place.leaf].shape)
        if not isinstance(argument, torch.Tensor) or argument.dim() != n_axes:
            raise BindingError(
                f"{name}: expected a tensor of {n_axes} dimensions, whose size {place.axis} is "
                f"{dim}, got {_argument_text(argument)}"
            )
        return argument.shape[place.axis], f"size {place.axis} of {name}"


def with_arguments(
    bound: BoundProgram, family: Family, numbers: Sequence[int | float]
) -> BoundProgram:
    """Return a Family's recorded Program with the varying integers of its arguments inserted.

    Args:
        bound: the Program.
        family: the Program's Family.
        numbers: of a choice of sizes.
    """
    if not family.arguments:
        return bound
    arguments = family.arguments_at(bound.arguments_structure, numbers)
    return dataclasses.replace(
        bound, bindings=dataclasses.replace(bound.bindings, arguments=arguments)
    )


def _argument_text(argument: Any) -> str:
    if argument is _MISSING:
        return "none"
    if isinstance(argument, torch.Tensor):
        return f"a tensor of shape {list(argument.shape)}"
    return f"a {type(argument).__qualname__}"


def _shown(kind: str, key: Any) -> str:
    if kind == "argument":
        return str(key[1] or f"args[{key[0]}]")
    return f".{key}" if kind == "object" else f"[{key!r}]"


def _path(program: Program, place: SizePlace) -> tuple[Step, ...]:
    """Return the path from a call's arguments to the argument that gives a size."""
    n_constants = 0

    def search(structure: Structure) -> tuple[Step, ...] | None:
        nonlocal n_constants
        if structure.kind == "constant":
            n_constants += 1
            return () if n_constants - 1 == place.constant else None
        if structure.kind == "tensor":
            return () if structure.leaf == place.leaf else None
        keys: Sequence[Any] = structure.keys or range(len(structure.children))
        if structure.kind == "record":
            keys = range(len(structure.children))
        for key, child in zip(keys, structure.children, strict=True):
            found = search(child)
            if found is not None:
                return ((structure.kind, key), *found)
        return None

    found = search(program.arguments_structure)
    assert found is not None  # checked by `varying_sizes`
    (_, group), (_, key), *rest = found
    names = program.parameter_names
    if group == 0:
        name = names[key] if key < len(names) else ""
        return (("argument", (key, name)), *rest)
    position = names.index(key) if key in names else -1
    return (("argument", (position, key)), *rest)


def _found(path: Sequence[Step], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument at the end of a path."""
    (_, (position, name)), *rest = path
    found = args[position] if 0 <= position < len(args) else kwargs.get(name, _MISSING)
    for kind, key in rest:
        get: Callable[[Any, Any], Any] = _attribute if kind == "object" else _item
        found = get(found, key)
    return found


def _attribute(thing: Any, key: Any) -> Any:
    return getattr(thing, key, _MISSING)


def _item(thing: Any, key: Any) -> Any:
    try:
        return thing[key]
    except (TypeError, KeyError, IndexError):
        return _MISSING
