"""What can be told of a model or function before it is called: its parameters, and refusals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from offload.errors import CaptureError


def _module_of(function: Callable[..., Any] | None) -> torch.nn.Module | None:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def parameter_names(function: Callable[..., Any] | None) -> tuple[str, ...]:
    """The names that positional arguments may be given by; empty where only the position counts."""
    target: Any = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return tuple(
        "" if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else parameter.name
        for parameter in parameters
        if parameter.kind in positional
    )


def refuse_compiled(function: Callable[..., Any] | None) -> None:
    """Refuse what torch.compile has wrapped: under the recorder's modes it would run eagerly.

    Raises:
        CaptureError: the callable, or a module inside it, is compiled.
    """
    module = _module_of(function)
    modules = [] if module is None else list(module.named_modules())
    compiled = [
        name or "the model"
        for name, one in modules
        if one._compiled_call_impl is not None or hasattr(one, "_orig_mod")
    ]
    if hasattr(function, "_torchdynamo_orig_callable"):
        compiled.append("the function")
    if compiled:
        raise CaptureError(
            f"{', '.join(compiled)} is compiled by torch.compile, which hides its launches: "
            "capture the model before compiling it"
        )


def refuse_hidden_reads(function: Callable[..., Any] | None) -> None:
    """Refuse scripted code that reads tensors where no mode sees it.

    Raises:
        CaptureError: a scripted module or function calls `tolist`.
    """
    module = _module_of(function)
    scripts: list[Any] = [function, *([] if module is None else module.modules())]
    if any("prim::tolist" in str(getattr(script, "inlined_graph", "")) for script in scripts):
        raise CaptureError(
            "scripted code calls tolist(), which reads a tensor where the recorder cannot see it: "
            "capture the Python function instead"
        )
