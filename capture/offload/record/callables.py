"""What is known of a model or function before it is called: its parameters, and refusals."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """The names of a callable's parameters; empty where they are unknown.

    Attributes:
        positional: those that can be given by position; an empty name for positional-only
            parameters.
        keyword_only: the others, without the callable's own **kwargs.
    """

    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()


def module_of(function: Callable[..., Any] | None) -> torch.nn.Module | None:
    """The module behind a callable: itself, or the module whose method it is."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def signature_of(function: Callable[..., Any] | None) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function, or of a module's forward; empty where they are unknown."""
    target: Any = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return tuple(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return ()


def parameters_of(function: Callable[..., Any] | None) -> Parameters:
    """The names by which arguments may be given."""
    parameters = signature_of(function)
    only, either = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return Parameters(
        tuple(
            "" if one.kind is only else one.name for one in parameters if one.kind in (only, either)
        ),
        tuple(one.name for one in parameters if one.kind is keyword_only),
    )


ORIGINAL_PREFIX = "_orig_mod."
"""In names of what a compiled module holds: torch keeps the original there."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledParts:
    """The names of what torch.compile has wrapped: the callable itself, or what it calls.

    Attributes:
        originals: what a compiler of torch's list compiles: it computes what the original computes,
            up to rounding, so the original is recorded.
        foreign: what a function of the user's compiles, which may compute anything.
    """

    originals: tuple[str, ...]
    foreign: tuple[str, ...]


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
        (path.removeprefix("self.") or "a function", one)
        for path, one in reached
        if id(one) not in known
    ]
    originals: list[str] = []
    foreign: list[str] = []
    for name, one in found:
        (originals if _is_compiled_by_torch(one) else foreign).append(
            name.replace(ORIGINAL_PREFIX, "")
        )
    return CompiledParts(tuple(dict.fromkeys(originals)), tuple(dict.fromkeys(foreign)))


def refuse_compiled(parts: tuple[str, ...], reason: str) -> None:
    """Refuse compiled callables.

    Args:
        parts: as `compiled_parts` gives them.
        reason: why they cannot be recorded, for the message.

    Raises:
        CaptureError: `parts` is not empty.
    """
    if parts:
        raise CaptureError(
            f"{', '.join(parts)} is compiled by torch.compile, which hides its launches: {reason}: "
            "capture the original model, before torch.compile (which keeps it as `_orig_mod`)"
        )


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


def is_compiling(thing: Any) -> bool:
    """Whether a function calls torch.compile on what it computes: `flex_attention`."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and thing is getattr(module, "flex_attention", module)


def _is_compiled_by_torch(wrapped: Any) -> bool:
    """Whether a compiler that torch lists by name has compiled it, such as inductor.

    torch.compile keeps the compiler in the context that its wrapper closes over.
    """
    if is_compiling(wrapped):
        return True
    compiled = wrapped
    if isinstance(wrapped, torch.nn.Module) and wrapped._compiled_call_impl is not None:
        compiled = wrapped._compiled_call_impl
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and isinstance(compiled, FunctionType):
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    compiler: Any = getattr(context, "callback", None)
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    name = getattr(compiler, "compiler_name", "")
    if name == "inductor":  # its wrapper is torch's own, and has no other function
        return not hasattr(compiler, "compiler_fn")
    known = torch._dynamo.list_backends(exclude_tags=None)
    return name in known and torch._dynamo.lookup_backend(name) is compiler.compiler_fn


def refuse_hidden_reads(function: Callable[..., Any] | None) -> None:
    """Refuse scripted code that reads tensors unseen by any mode.

    Raises:
        CaptureError: a scripted module or function calls `tolist`.
    """
    module = module_of(function)
    scripts: list[Any] = [function, *([] if module is None else module.modules())]
    if any("prim::tolist" in str(getattr(script, "inlined_graph", "")) for script in scripts):
        raise CaptureError(
            "scripted code calls tolist(), which reads a tensor where the recorder cannot see it: "
            "capture the Python function instead"
        )
