"""Hooks around a module's forward during a block, with little effect on other threads.

Another thread may call, copy or pickle the module meanwhile. Its calls also run the hooks, which
must leave them alone, perhaps without the keyword arguments: torch enters a hook before it notes
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

_registering = threading.Lock()  # torch numbers hooks without a lock

_PRE_HOOKS, _HOOKS = "_forward_pre_hooks", "_forward_hooks"
# What torch notes about hooks, ahead of the hooks themselves.
_NOTES = (f"{_PRE_HOOKS}_with_kwargs", f"{_HOOKS}_with_kwargs", f"{_HOOKS}_always_called")
_ALL = (*_NOTES, _PRE_HOOKS, _HOOKS)

_Hooks = dict[str, OrderedDict[int, Any]]
"""The module's hook attributes by name, each by the number of the hook."""


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
        model: the module.
        before: takes the module, its arguments and keyword arguments; returns others, or None.
        after: takes these and the result, also if the forward raised; returns another result, or
            None.
    """
    with _registering:
        remove = _registered(model, _Hook(before), _Hook(after))
    try:
        yield
    finally:
        with _registering:
            remove()


def _registered(model: torch.nn.Module, before: _Hook, after: _Hook) -> Callable[[], None]:
    _pass_numbers_of(model)
    if not _has_ours_alone(model):
        first = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True).id
        second = model.register_forward_hook(after, with_kwargs=True, always_call=True).id
        return lambda: _removed(model, first, second)
    first, second = RemovableHandle(OrderedDict()).id, RemovableHandle(OrderedDict()).id

    def add(hooks: _Hooks) -> None:
        for name, number in zip(_NOTES, (first, second, second), strict=True):
            hooks[name][number] = True
        hooks[_PRE_HOOKS][first] = before
        hooks[_PRE_HOOKS].move_to_end(first, last=False)
        hooks[_HOOKS][second] = after

    _change(model, add, _ALL)
    return lambda: _removed(model, first, second)


def _pass_numbers_of(model: torch.nn.Module) -> None:
    """Let torch number hooks beyond those of the module, which may be unpickled ones.

    It counts them by process, and would overwrite them with new hooks.
    """
    numbers = [number for hooks in _hooks_of(model).values() for number in hooks]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(one + 1 for one in numbers)])


def _removed(model: torch.nn.Module, first: int, second: int) -> None:
    """Remove two hooks by their numbers."""

    def remove(hooks: _Hooks) -> None:
        for name in reversed(_ALL):
            hooks[name].pop(first, None)
            hooks[name].pop(second, None)

    if _has_ours_alone(model):
        _change(model, remove, _ALL[::-1])
    else:
        remove(_hooks_of(model))


def _change(
    model: torch.nn.Module, change: Callable[[_Hooks], None], order: tuple[str, ...]
) -> None:
    """Change copies of a module's hook attributes, and assign them in some order.

    A hook that another thread registers meanwhile is in the old attributes, which its handle refers
    to: these are then restored, and changed in place.
    """
    there = _hooks_of(model)
    numbers = {name: list(hooks) for name, hooks in there.items()}
    copies: _Hooks = {name: OrderedDict(hooks) for name, hooks in there.items()}
    change(copies)
    _put(model, copies, order)
    if any(list(there[name]) != numbers[name] for name in _ALL):
        change(there)
        _put(model, there, order)


def _has_ours_alone(model: torch.nn.Module) -> bool:
    """Whether no other code has a handle to a hook of the module.

    The hook attributes may then be replaced: a thread that iterates over them meanwhile, as a copy
    does, sees them unchanged.
    """
    return all(
        isinstance(hook, _Hook)
        for name in (_PRE_HOOKS, _HOOKS)
        for hook in getattr(model, name).values()
    )


def _hooks_of(model: torch.nn.Module) -> _Hooks:
    return {name: getattr(model, name) for name in _ALL}


def _put(model: torch.nn.Module, hooks: _Hooks, order: tuple[str, ...]) -> None:
    """Replace a module's hook attributes without adding or removing a key."""
    for name in order:
        vars(model)[name] = hooks[name]
