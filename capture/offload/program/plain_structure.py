"""The nesting of arguments and results as plain data, and back to live objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from offload.program.constants import PLAIN_TYPES, Content
from offload.program.structure import Structure
from offload.program.values import Symbol

TORCH_KINDS = ("dtype", "device", "layout", "memory_format")
"""The kinds of torch's objects that are their own Symbols, by class name."""


def plain_structure(structure: Structure) -> Structure:
    """The same nesting without classes, each object replaced by a Symbol of its name."""
    return dataclasses.replace(
        structure,
        children=tuple(plain_structure(child) for child in structure.children),
        keys=tuple(_plain(key) for key in structure.keys),
        constant=_plain(structure.constant),
        container=None,
    )


def with_objects(structure: Structure, find: Callable[[Symbol], Any]) -> Structure:
    """The same nesting with the objects that its Symbols name.

    Args:
        structure: as from `plain_structure`.
        find: returns the object of a Symbol.
    """
    return dataclasses.replace(
        structure,
        children=tuple(with_objects(child, find) for child in structure.children),
        keys=tuple(_found(key, find) for key in structure.keys),
        constant=_found(structure.constant, find),
    )


def _plain(thing: Any) -> Any:
    if type(thing) in (*PLAIN_TYPES, bytes, Symbol):
        return thing
    if type(thing) is tuple:
        return tuple(_plain(item) for item in thing)
    cls = thing.cls if isinstance(thing, Content) else type(thing)
    if cls.__module__ == "torch" and cls.__name__ in TORCH_KINDS:
        return Symbol(cls.__name__, str(thing).removeprefix("torch."))
    return Symbol("object", f"{cls.__module__}.{cls.__qualname__}")


def _found(thing: Any, find: Callable[[Symbol], Any]) -> Any:
    if type(thing) is tuple:
        return tuple(_found(item, find) for item in thing)
    return find(thing) if isinstance(thing, Symbol) else thing
