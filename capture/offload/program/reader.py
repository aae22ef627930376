"""Reads untrusted JSON, and says where it differs from what is expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeVar

from offload.errors import ProgramError

Item = TypeVar("Item")

MAXIMUM_INTEGER = 2**63 - 1

# The most characters of a found value that a message shows.
_SHOWN = 60


def parse(text: bytes, where: str) -> Node:
    """Parse JSON as strictly as the standard requires.

    Raises:
        ProgramError: it is not JSON, repeats a key, nests too deeply, or holds a number that JSON
            does not have.
    """
    try:
        return Node(
            json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant), where
        )
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{where} is not valid JSON ({error})") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is repeated")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _describe(value: Any) -> str:
    if type(value) is dict:
        return f"an object of {len(value)}"
    if type(value) is list:
        return f"an array of {len(value)}"
    found = json.dumps(value)
    return found if len(found) <= _SHOWN else found[:_SHOWN] + "..."


class Node:
    """One JSON value and its place.

    Every method raises ProgramError if the value is not what the method's name says.
    """

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def fail(self, expected: str) -> NoReturn:
        """Refuse the value."""
        raise ProgramError(f"{self.where}: expected {expected}, got {_describe(self.value)}")

    def keys(self) -> Collection[str]:
        """The keys of an object; empty for anything else."""
        return self.value.keys() if type(self.value) is dict else ()

    def only_key(self) -> str:
        """The key of an object that has a single key; empty for anything else."""
        keys = list(self.keys())
        return keys[0] if len(keys) == 1 else ""

    def fields(self, *names: str) -> list[Node]:
        """The values of an object that has exactly these keys, in the order of `names`."""
        if type(self.value) is not dict or self.value.keys() != set(names):
            self.fail(f"an object with the keys {', '.join(names)}")
        return [Node(self.value[name], f"{self.where}.{name}") for name in names]

    def mapping(self) -> dict[str, Node]:
        """The values of an object by key."""
        if type(self.value) is not dict:
            self.fail("an object")
        return {key: Node(item, f"{self.where}.{key}") for key, item in self.value.items()}

    def items(self) -> list[Node]:
        """The items of an array."""
        if type(self.value) is not list:
            self.fail("an array")
        return [Node(item, f"{self.where}[{index}]") for index, item in enumerate(self.value)]

    def integer(self, low: int = 0, high: int = MAXIMUM_INTEGER) -> int:
        """An integer from `low` to `high`, inclusive."""
        if type(self.value) is not int or not low <= self.value <= high:
            self.fail(f"an integer from {low} to {high}")
        return self.value

    def integers(self) -> tuple[int, ...]:
        """An array of non-negative integers."""
        return tuple(item.integer() for item in self.items())

    def text(self) -> str:
        """A string."""
        if type(self.value) is not str:
            self.fail("a string")
        return self.value

    def texts(self) -> tuple[str, ...]:
        """An array of strings."""
        return tuple(item.text() for item in self.items())

    def boolean(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            self.fail("true or false")
        return self.value

    def one_of(self, choices: Collection[str], what: str) -> str:
        """A string among `choices`."""
        if type(self.value) is not str or self.value not in choices:
            self.fail(what)
        return self.value

    def each(self, read: Callable[[Node], Item]) -> tuple[Item, ...]:
        """The items of an array, each read by `read`."""
        return tuple(read(item) for item in self.items())
