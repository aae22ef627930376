"""Varying sizes inside a call's results that no number of a Program represents."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

import torch

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# References of these are not content of the returned object.
_OTHERS = (torch.Tensor, torch.nn.Module, ModuleType, type)

# Limit of visited objects; an object that is returned for its content has fewer.
_MOST_OBJECTS = 10_000


def hides_size(constant: Any) -> bool:
    """Whether a constant of a result is not a number but holds a number that varies with sizes.

    Examples are a slice, a deque, or an object of a user's class: a replay would give the recorded
    number.

    Args:
        constant: from a call that was recorded over symbolic sizes.
    """
    if isinstance(constant, _NUMBERS):
        return False
    seen: dict[int, Any] = {}  # keeps the objects, so that no address is reused
    left = [constant]
    while left and len(seen) < _MOST_OBJECTS:
        one = left.pop()
        if isinstance(one, _NUMBERS):
            return True
        if id(one) in seen or isinstance(one, _OTHERS):
            continue
        seen[id(one)] = one
        left += _content(one)
    return False


def _content(one: Any) -> list[Any]:
    if isinstance(one, FunctionType):  # its globals belong to the module
        return [one.__closure__, one.__defaults__, one.__kwdefaults__]
    return gc.get_referents(one)
