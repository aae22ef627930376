"""What a call is given besides tensors: whether it is the same again."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from types import FunctionType, ModuleType
from typing import Any

PLAIN_TYPES = (type(None), bool, int, float, complex, str)

# Of these, identity is proof of being the same; another object may have been changed since.
_IMMUTABLE_TYPES = (*PLAIN_TYPES, bytes, range, type, enum.Enum, FunctionType, ModuleType)


def is_immutable(node: Any) -> bool:
    """Whether an object stays itself as long as it is the same object.

    It cannot change (torch's dtypes, devices and the like are told by their module), or it is a
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
    """A changeable object's class and content; None where it cannot be told."""

    cls: type
    digest: bytes | None

    def __repr__(self) -> str:
        return f"the content of a {self.cls.__qualname__}"


def content_of(node: Any) -> Content:
    """The content that a changeable object has now."""
    return Content(type(node), _digest(node))


def _digest(node: Any) -> bytes | None:
    """An object's content as bytes to compare; they are never read back."""
    try:
        return pickle.dumps(node, protocol=5)
    except Exception:  # an object may forbid it in any way; then it is equal to nothing
        return None


def same_constant(one: Any, other: Any) -> bool:
    """Whether a replay may take `other` for the recorded `one`: floats by their bits."""
    if isinstance(one, Content):
        return type(other) is one.cls and one.digest is not None and _digest(other) == one.digest
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # tells -0.0 from 0.0, and finds nan again
    try:
        return bool(one == other)
    except Exception:  # a user's __eq__ may do anything; only a clear yes counts
        return False
