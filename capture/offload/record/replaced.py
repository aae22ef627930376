"""Replaces a function of torch's or Triton's during a recording."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from offload.record.modes import DispatchMode, Watcher


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a function of a module, or a method of a class, call another function, on all threads.

    Recordings run one at a time, so replacements are nested.

    Args:
        owner: the module or class.
        name: of its function.
        function: takes the one that it replaces, and the arguments of a call.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def is_watched_by(watcher: Watcher) -> bool:
    """Whether a recorder sees what this thread does now; autograd's threads have its mode."""
    return any(
        isinstance(one, DispatchMode) and one.reports_to(watcher)
        for one in _get_current_dispatch_mode_stack()
    )
