"""Replaces attributes of torch's modules for lookups on a recording thread.

Other threads always find torch's objects.
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
    """By module and name, the value that this thread finds in place of an attribute."""
    if not hasattr(_of_thread, "found"):
        _of_thread.found = {}
    found: dict[tuple[str, str], Any] = _of_thread.found
    return found


def _install(module: ModuleType, name: str) -> None:
    """Give each thread its own value of an attribute, by a property in the module's class.

    The class stays. A thread without its own value finds the module's.
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

    Names imported from the module earlier are unaffected.
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
    """The answers of `torch.compiler.is_compiling()` on the recording thread, and their callers.

    Owner: one recording, on its thread.

    Attributes:
        answer: what model code gets; with True models keep values on the device.
    """

    # They ask only to keep their own hooks and fast paths away from torch's compiler.
    _TORCH = frozenset({"torch.nn.modules.module", "torch.nn.modules.transformer"})

    def __init__(self, *, answer: bool) -> None:
        self.answer = answer
        self._was_asked = False

    def is_compiling(self) -> bool:
        """Replace torch's function of that name."""
        asking = sys._getframe(1).f_globals.get("__name__", "")
        # Compiled optimizers would compute with other roundings.
        if asking in self._TORCH or asking.startswith("torch.optim."):
            return False
        self._was_asked = True
        return self.answer

    def may_matter(self) -> bool:
        """Whether model code got False, and may behave otherwise with True."""
        return self._was_asked and not self.answer

    def given(self) -> contextlib.AbstractContextManager[None]:
        """A context in which these are the answers on this thread."""
        return found_on_this_thread(torch.compiler, "is_compiling", self.is_compiling)


def eager_paths_taken() -> contextlib.AbstractContextManager[None]:
    """Let torch's own layers choose their path as if no mode were active.

    nn.TransformerEncoder, its layers and nn.MultiheadAttention leave their fast path, which gives
    other values at padded places, when a function mode is active. They look that up at each call;
    torch's functions, which invoke the function mode, do not.
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
