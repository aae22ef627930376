"""Hooks around a module's forward for the time of a block, which other threads hardly meet.

Another thread may call, copy or pickle the module meanwhile. It calls the hooks as well, which are
to leave its calls alone, perhaps without the keyword arguments: torch enters a hook before it notes
how the hook is called. A copy has functions that do nothing in their place.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_registering = threading.Lock()  # torch numbers hooks without one

_PRE_HOOKS, _HOOKS = "_forward_pre_hooks", "_forward_hooks"
# What torch notes of hooks, ahead of the hooks themselves.
_NOTES = (f"{_PRE_HOOKS}_with_kwargs", f"{_HOOKS}_with_kwargs", f"{_HOOKS}_always_called")


def leave_alone(*_: Any) -> None:
    """A hook that does nothing."""


def _copied() -> Callable[..., None]:
    return leave_alone


class _Hook:
    """A hook whose copies do nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _copied, ()


@contextlib.contextmanager
def hooked(
    model: torch.nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[None]:
    """Call `before` ahead of all other hooks of a module's forward, and `after` behind them.

    Args:
        model: whose calls.
        before: of the module, its arguments and keyword arguments: gives others, or None.
        after: of these and the result, also where the forward raised: gives another, or None.
    """
    with _registering:
        remove = _registered(model, _Hook(before), _Hook(after))
    try:
        yield
    finally:
        with _registering:
            remove()


def _registered(model: torch.nn.Module, before: _Hook, after: _Hook) -> Callable[[], None]:
    kept = {name: getattr(model, name) for name in (*_NOTES, _PRE_HOOKS, _HOOKS)}
    if any(kept.values()):
        handles = [
            model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

        def remove_handles() -> None:
            for one in reversed(handles):
                one.remove()

        return remove_handles
    # Nobody has a handle to a hook of these, so other ones may take their place: to whoever walks
    # them meanwhile, as a copy does, they stay as they are.
    own: dict[str, Any] = {name: OrderedDict() for name in kept}
    first, second = RemovableHandle(own[_PRE_HOOKS]).id, RemovableHandle(own[_HOOKS]).id
    own[_PRE_HOOKS][first] = before
    own[_HOOKS][second] = after
    for name, number in zip(_NOTES, (first, second, second), strict=True):
        own[name][number] = True
    _put(model, own)

    def remove() -> None:
        if all(getattr(model, name) is own[name] and len(own[name]) == 1 for name in own):
            _put(model, dict(reversed(kept.items())))
            return
        for name in reversed(own):  # others were registered meanwhile
            getattr(model, name).pop(first, None)
            getattr(model, name).pop(second, None)

    return remove


def _put(model: torch.nn.Module, hooks: dict[str, Any]) -> None:
    """Replace what a module has of hooks, in this order, while no key of it comes or goes."""
    for name, one in hooks.items():
        vars(model)[name] = one
