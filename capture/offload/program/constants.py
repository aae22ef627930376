"""What a call is given besides tensors, and whether it is the same again."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

PLAIN_TYPES = (type(None), bool, int, float, complex, str)

# For these, identity proves equality; any other object may have been changed since.
_IMMUTABLE_TYPES = (*PLAIN_TYPES, bytes, range, type, enum.Enum, FunctionType, ModuleType)


def is_immutable(node: Any) -> bool:
    """Whether identity proves that an object is unchanged.

    It is immutable (torch's dtypes, devices and the like are recognised by their module), or a
    random generator, which executions follow.
    """
    if isinstance(node, _IMMUTABLE_TYPES) or type(node).__module__ == "torch":
        return True
    if is_generator(node):
        return True
    return hasattr(type(node), "__members__") and hasattr(node, "__int__")  # pybind11's enum_


def is_generator(node: Any) -> bool:
    """Whether it is one of torch's random generators."""
    return (type(node).__module__, type(node).__name__) == ("torch._C", "Generator")


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """The class and content of a mutable object.

    Attributes:
        cls: the class.
        digest: the content; None if it cannot be determined.
        fields: its attributes or items by key or position: the value, or the Content of a mutable
            one; to name what differs. Empty below a few levels, and if there are too many.
    """

    cls: type
    digest: bytes | None
    fields: Mapping[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return f"a {self.cls.__qualname__} of other content"


# How deep a difference is followed into an object, and over how many fields.
_FIELD_DEPTH = 3
_MOST_FIELDS = 256


def content_of(node: Any, depth: int = _FIELD_DEPTH) -> Content:
    """Return the current content of a mutable object, with its fields down to `depth` levels."""
    fields = fields_of(node) if depth > 0 else {}
    if len(fields) > _MOST_FIELDS:
        fields = {}
    return Content(
        type(node),
        _digest(node),
        {
            key: field if is_immutable(field) else content_of(field, depth - 1)
            for key, field in fields.items()
        },
    )


def fields_of(node: Any) -> dict[Any, Any]:
    """The items of a list, tuple or mapping by position or key; attributes of other objects."""
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    if isinstance(node, Mapping):
        return dict(node)
    return dict(getattr(node, "__dict__", {}))


def difference(one: Any, other: Any) -> tuple[str, Any, Any]:
    """Where an object first differs from what was recorded, for an error message.

    Returns:
        The place below it, such as `['rate'][2]`, the recorded value and the present value; an
        empty place if they differ as a whole.
    """
    if isinstance(one, Content) and type(other) is one.cls:
        fields = fields_of(other)
        if one.fields.keys() == fields.keys():
            for key, recorded in one.fields.items():
                if not same_constant(recorded, fields[key]):
                    place, expected, got = difference(recorded, fields[key])
                    return f"[{key!r}]{place}", expected, got
    return "", one, other


def _digest(node: Any) -> bytes | None:
    """An object's content as bytes to compare; never read back."""
    try:
        return pickle.dumps(node, protocol=5)
    except Exception:  # pickling may fail in any way; the object then equals nothing
        return None


def same_constant(one: Any, other: Any) -> bool:
    """Whether a replay may use `other` for the recorded `one`: floats by their bits."""
    if isinstance(one, Content):
        return type(other) is one.cls and one.digest is not None and _digest(other) == one.digest
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # distinguishes -0.0 from 0.0, and matches nan
    try:
        return bool(one == other)
    except Exception:  # a user's __eq__ may raise anything; only a clear yes counts
        return False
