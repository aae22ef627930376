"""What code that runs on a recording thread finds where it looks torch's own state up.

Other threads find at any time what torch has: the same objects.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from offload.record.modes import FunctionMode

_installing = threading.Lock()
_installed: set[tuple[str, str]] = set()
_of_thread = threading.local()


def _found_here() -> dict[tuple[str, str], Any]:
    """By module and name, what this thread finds in the place of an attribute."""
    if not hasattr(_of_thread, "found"):
        _of_thread.found = {}
    found: dict[tuple[str, str], Any] = _of_thread.found
    return found


def _install(module: ModuleType, name: str) -> None:
    """Let each thread find a value of its own, by a property in the class of the module.

    The class stays. A thread that has no value of its own finds what the module has.
    """
    key = (module.__name__, name)

    def get(owner: ModuleType) -> Any:
        found = _found_here()
        if key in found:
            return found[key]
        try:
            return vars(owner)[name]
        except KeyError:
            raise AttributeError(f"module {key[0]!r} has no attribute {name!r}") from None

    def assign(owner: ModuleType, value: Any) -> None:
        vars(owner)[name] = value

    def delete(owner: ModuleType) -> None:
        del vars(owner)[name]

    with _installing:
        if key not in _installed:
            shared = type(module)
            attribute = property(get, assign, delete)
            module.__class__ = type(shared.__name__, (shared,), {name: attribute})
            _installed.add(key)


@contextlib.contextmanager
def found_on_this_thread(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Let `module.name` be `value` for this thread alone.

    Names that were imported from the module before are what they were.
    """
    _install(module, name)
    key, found = (module.__name__, name), _found_here()
    outside = dict(found)
    found[key] = value
    try:
        yield
    finally:
        found.clear()
        found.update(outside)


class CompilingAnswers:
    """What `torch.compiler.is_compiling()` answers on the recording thread, and who has asked.

    Owner: one recording, on its thread.

    Attributes:
        told: the model is told that it is being compiled, so that it keeps values on the device.
    """

    # They ask only to keep their own hooks and fast paths away from torch's compiler.
    _TORCH = frozenset({"torch.nn.modules.module", "torch.nn.modules.transformer"})

    def __init__(self, *, told: bool) -> None:
        self.told = told
        self._was_asked = False

    def is_compiling(self) -> bool:
        """Stands for the function of that name."""
        asking = sys._getframe(1).f_globals.get("__name__", "")
        # Optimizers would compute with other roundings.
        if asking in self._TORCH or asking.startswith("torch.optim."):
            return False
        self._was_asked = True
        return self.told

    def may_matter(self) -> bool:
        """Whether model code was told that it is not being compiled, and might act otherwise."""
        return self._was_asked and not self.told

    def given(self) -> contextlib.AbstractContextManager[None]:
        """For its time these are the answers on this thread."""
        return found_on_this_thread(torch.compiler, "is_compiling", self.is_compiling)


def eager_paths_taken() -> contextlib.AbstractContextManager[None]:
    """Let torch's own layers choose the path that they take when nobody watches.

    nn.TransformerEncoder, its layers and nn.MultiheadAttention leave their fast path, which gives
    other values at padded places, where a function mode is active. They look it up at each call;
    torch's functions, by which the function mode is told, do not.
    """
    has_torch_function: Callable[[Iterable[Any]], bool] = torch.overrides.has_torch_function

    def has_other_torch_function(args: Iterable[Any]) -> bool:
        modes = torch.overrides._get_current_function_mode_stack()
        if all(isinstance(mode, FunctionMode) for mode in modes):
            return any(map(_has_own_torch_function, args))
        return bool(has_torch_function(args))

    return found_on_this_thread(torch.overrides, "has_torch_function", has_other_torch_function)


def _has_own_torch_function(thing: Any) -> bool:
    none = torch._C._disabled_torch_function_impl
    return type(thing) is not torch.Tensor and (
        getattr(type(thing), "__torch_function__", none) is not none
    )
