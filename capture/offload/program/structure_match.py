"""Whether a call's arguments or result are nested as recorded, and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offload.program.constants import PLAIN_TYPES, difference, is_generator, same_constant
from offload.program.structure import Structure, describe, name_of, parts_of


class StructureMismatch(Exception):
    """A call's nesting differs from the recorded one; the message says where and how.

    Attributes:
        given: what was given in place of a tensor; None where something else differs.
    """

    def __init__(self, message: str, given: object = None) -> None:
        """Keep what was given in place of a tensor."""
        super().__init__(message)
        self.given = given


def match(
    expected: Structure, tree: Any, is_tensor: Callable[[Any], bool], where: str
) -> list[Any]:
    """List the tensors of `tree`, which must be nested as `expected`.

    Containers must be of the recorded classes (where known), and mappings in the recorded order of
    keys: Python code can distinguish both.

    Returns:
        The tensors, one for each leaf of `expected` in order.

    Raises:
        StructureMismatch: a kind, a class, a length, a key, their order or a constant differs; the
            message names the place below `where`.
    """
    if is_tensor(tree):
        if expected.kind == "tensor":
            return [tree]
        raise StructureMismatch(f"{where}: expected {describe(expected)}, got a tensor")
    if expected.kind == "tensor":
        raise StructureMismatch(f"{where}: expected a tensor, got {_describe_object(tree)}", tree)
    if expected.kind == "constant":
        if not same_constant(expected.constant, tree):
            if is_generator(expected.constant) and is_generator(tree):
                raise StructureMismatch(
                    f"{where}: a program draws from the generator that it was recorded with, got "
                    "another: pass that one, seeded or with its state set as you need"
                )
            place, recorded, given = difference(expected.constant, tree)
            raise StructureMismatch(
                f"{where}{place}: recorded with {recorded!r}, got {_describe_object(given)}"
            )
        return []
    tensors: list[Any] = []
    items = _matching_items(expected, tree, is_tensor, where)
    for position, (child, item) in enumerate(zip(expected.children, items, strict=True)):
        label = repr(expected.keys[position]) if expected.keys else str(position)
        tensors += match(child, item, is_tensor, f"{where}[{label}]")
    return tensors


# What a container whose class a file does not hold may be replaced by, as `unflatten` does.
_PLAIN_KINDS = {"record": "tuple", "mapping": "dict", "object": "dict"}


def _matching_items(
    expected: Structure, tree: Any, is_tensor: Callable[[Any], bool], where: str
) -> list[Any]:
    """The items of a container that matches `expected`."""
    parts = parts_of(tree, is_tensor)
    if parts is None and expected.kind == "object" and type(tree) is expected.container:
        parts = "object", tuple(vars(tree)), list(vars(tree).values())  # holds no tensor now
    kind, keys, items = parts or ("", (), [])
    if expected.container is None:
        fits = kind == expected.kind or kind == _PLAIN_KINDS.get(expected.kind)
    else:
        fits = kind == expected.kind and type(tree) is expected.container
    named = kind not in ("list", "tuple")
    fits = fits and len(items) == len(expected.children)
    if not fits or (named and set(keys) != set(expected.keys)):
        raise StructureMismatch(
            f"{where}: expected {describe(expected)}, got {_describe_object(tree)}"
        )
    if named and not all(map(_same_key, keys, expected.keys)):
        raise StructureMismatch(
            f"{where}: expected the keys in the recorded order {list(expected.keys)}, got "
            f"{list(keys)}: code that iterates over them would do something else"
        )
    return items


def _same_key(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _describe_object(tree: Any) -> str:
    if isinstance(tree, PLAIN_TYPES):
        return repr(tree)
    keys = f" with keys {list(tree)}" if isinstance(tree, Mapping) else ""
    size = f" of {len(tree)}" if isinstance(tree, (Sequence, Mapping)) else ""
    return f"a {name_of(type(tree)).removeprefix('builtins.')}{size}{keys}"
