"""What torch.compile has wrapped, as far as it is found before a call.

Private part of torch: `callback` of the context of a compiled function
(torch/_dynamo/eval_frame.py, 2.13).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from offload.errors import CaptureError
from offload.record.callables import module_of
from offload.record.compilers import (
    are_originals_called,
    is_in_torch,
    is_of_torch,
    settings_of_user,
)

ORIGINAL_PREFIX = "_orig_mod."
"""In names of what a compiled module holds: torch keeps the original there."""

FLEX_ATTENTION = "torch.nn.attention.flex_attention"


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledParts:
    """The names of what torch.compile has wrapped: the callable itself, or what it calls.

    Attributes:
        originals: what a compiler of torch's, or of an installed package, compiles: it computes
            what the original computes, up to rounding, so the original is recorded.
        foreign: what a function of the user's compiles, which may compute anything.
        compilers: what torch calls to compile the originals; torch makes one for each use of
            torch.compile.
        settings: of torch's compilers that hold functions of the user's, for the foreign ones.
    """

    originals: tuple[str, ...]
    foreign: tuple[str, ...]
    compilers: tuple[Any, ...] = ()
    settings: tuple[str, ...] = ()


def compiled_parts(
    function: Callable[..., Any] | None, reached: Sequence[tuple[str, Any]]
) -> CompiledParts:
    """What torch.compile has wrapped in a callable.

    Args:
        function: the callable.
        reached: compiled functions that it can reach, with their paths.
    """
    found = [(name or "the model", one) for name, one in _modules_of(function)]
    if module_of(function) is None:
        found.append(("the function", _behind_partials(function)))
    found = [(name, one) for name, one in found if _is_compiled(one)]
    wrappers = ("_compiled_call_impl", "forward")  # of the modules among them
    known = {id(getattr(one, name, None)) for _, one in found for name in wrappers}
    known |= {id(one) for _, one in found}
    found += [
        (path.removeprefix("self.") or name_of(one), one)
        for path, one in reached
        if id(one) not in known
    ]
    originals: list[str] = []
    foreign: list[str] = []
    settings: list[str] = []
    is_eager = are_originals_called()
    for name, one in found:
        compiler = _compiler_of(one)
        is_torchs = is_eager or is_compiling(one) or is_of_torch(compiler)
        (originals if is_torchs else foreign).append(name.replace(ORIGINAL_PREFIX, ""))
        settings += () if is_torchs else settings_of_user(compiler)
    return CompiledParts(
        tuple(dict.fromkeys(originals)),
        tuple(dict.fromkeys(foreign)),
        tuple(one if is_compiling(one) else _compiler_of(one) for _, one in found),
        tuple(dict.fromkeys(settings)),
    )


def refuse_compiled(found: CompiledParts, reason: str) -> None:
    """Refuse callables that a function of the user's compiles.

    Args:
        found: as `compiled_parts` gives them.
        reason: why they cannot be recorded, for the message.

    Raises:
        CaptureError: there are some.
    """
    if found.foreign:
        raise CaptureError(
            f"{', '.join(found.foreign)} is compiled by torch.compile, which hides its launches"
            f"{by_settings(found.settings)}: {reason}: capture the original model, before "
            "torch.compile (which keeps it as `_orig_mod`)"
        )


def by_settings(names: Sequence[str]) -> str:
    """What functions of the user's in settings do, for messages; nothing if there are none."""
    if not names:
        return ""
    return f", and functions of your own in {', '.join(names)} may change what it computes"


def name_of(function: Any) -> str:
    """A function's name for messages; of one inside torch, that of torch's public function."""
    outer, _, inner = getattr(function, "__qualname__", "a function").rpartition(".<locals>.")
    return str(outer.partition(".")[0] if outer and is_in_torch(function) else inner)


def _behind_partials(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _modules_of(function: Callable[..., Any] | None) -> list[tuple[str, torch.nn.Module]]:
    module = module_of(function)
    return [] if module is None else list(module.named_modules())


def _is_compiled(thing: Any) -> bool:
    if isinstance(thing, torch.nn.Module):
        return thing._compiled_call_impl is not None or hasattr(thing, "_orig_mod")
    return is_compiled_function(thing)


def is_compiled_function(thing: Any) -> bool:
    """Whether torch.compile has wrapped a function; `torch.compiler.disable` wraps it likewise."""
    return hasattr(thing, "_torchdynamo_orig_callable") and not getattr(
        thing, "_torchdynamo_disable", False
    )


def original_of(wrapper: FunctionType) -> Any:
    """The function that torch.compile or torch.compiler.disable has wrapped.

    A function of torch's own, as the `forward` of nn.Sequential, has two wrappers (`wrap_inline` in
    torch/_dynamo/external_utils.py, 2.13).
    """
    original = vars(wrapper)["_torchdynamo_orig_callable"]
    scope = getattr(original, "__globals__", {})
    is_inner = scope.get("__name__") == "torch._dynamo.external_utils"
    return getattr(original, "__wrapped__", original) if is_inner else original


def is_compiling(thing: Any) -> bool:
    """Whether a function calls torch.compile on what it computes: `flex_attention`."""
    module = sys.modules.get(FLEX_ATTENTION)
    return module is not None and thing is getattr(module, "flex_attention", module)


def _compiler_of(wrapped: Any) -> Any:
    """What torch calls to compile a wrapped module or function; None if that is unknown.

    torch.compile keeps it in the context that its wrapper closes over.
    """
    compiled = wrapped
    if isinstance(wrapped, torch.nn.Module) and wrapped._compiled_call_impl is not None:
        compiled = wrapped._compiled_call_impl
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and isinstance(compiled, FunctionType):
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    return getattr(context, "callback", None)
