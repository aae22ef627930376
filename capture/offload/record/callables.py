"""What is known of a model or function before it is called: its parameters, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
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
