"""Sizes that vary within what a call returns, where no number of a Program stands for them."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

import torch

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# What these refer to is no content of the object that was returned.
_OTHERS = (torch.Tensor, torch.nn.Module, ModuleType, type)

# So many objects are looked at, which one that is returned for its content does not have.
_MOST_OBJECTS = 10_000


def hides_size(constant: Any) -> bool:
    """Whether a constant of a result is no number, but holds one that varies with sizes.

    Such as a slice, a deque, or an object of a user's class: a replay would give the recorded one.

    Args:
        constant: of a call that was recorded over symbolic sizes.
    """
    if isinstance(constant, _NUMBERS):
        return False
    seen: dict[int, Any] = {}  # which keeps them, so that no address is used twice
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
    if isinstance(one, FunctionType):  # its globals are the module's
        return [one.__closure__, one.__defaults__, one.__kwdefaults__]
    return gc.get_referents(one)
