"""What is known of a model or function before it is called: its parameters, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
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


def compiled_parts(function: Callable[..., Any] | None) -> tuple[str, ...]:
    """The names of what torch.compile has wrapped: the callable itself, or modules inside it.

    Under the recorder's modes these would run eagerly.
    """
    found = [name or "the model" for name, one in _modules_of(function) if _is_compiled(one)]
    if module_of(function) is None and _is_compiled(_behind_partials(function)):
        found.append("the function")
    return tuple(found)


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


def refuse_nested_captures(function: Callable[..., Any] | None) -> None:
    """Refuse a callable that captures graphs itself at each call.

    torch.compile keeps its settings in the context that the wrapper closes over: for inductor the
    configuration, for other compilers the compiler alone.

    Raises:
        CaptureError: the callable, or a module inside it, was compiled for CUDA graphs.
    """
    behind = _behind_partials(function)
    candidates = [("the function", behind), *_modules_of(function)]
    for name, one in candidates:
        for compiled in (one, getattr(one, "_compiled_call_impl", None)):
            if _is_compiled(compiled) and _captures_graphs(compiled):
                raise CaptureError(
                    f"{name or 'the model'} is compiled with CUDA graphs of its own "
                    '(mode="reduce-overhead" or "max-autotune", or the backend "cudagraphs"), and '
                    "a capture cannot contain another one: compile it without them "
                    '(mode="max-autotune-no-cudagraphs", or no mode), since offload makes the '
                    "graph"
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
    return hasattr(thing, "_torchdynamo_orig_callable")


def _captures_graphs(compiled: Any) -> bool:
    """Whether a callable that torch.compile has wrapped was compiled for CUDA graphs."""
    configuration = getattr(compiled, "get_compiler_config", lambda: None)()
    if configuration and configuration.get("triton.cudagraphs"):
        return True
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and isinstance(compiled, FunctionType):
        variables = inspect.getclosurevars(compiled).nonlocals
        context = variables.get("self")
    compiler: Any = getattr(context, "callback", None)
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return getattr(compiler, "compiler_name", "") == "cudagraphs"


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
