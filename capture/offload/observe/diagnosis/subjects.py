"""What can be diagnosed: a model with inputs that it accepts. All else is refused in advance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.api.captured import Captured
from offload.console.user_code import callable_name
from offload.errors import DiagnosisError
from offload.program import Program
from offload.run import Executable

_EXPECTED = "expected a module or a function on tensors, and its inputs: offload.diagnose(model, x)"


def check_subject(model: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse an object that is not a model, and arguments that it does not accept.

    Calls a function without arguments.

    Raises:
        DiagnosisError: it cannot be called, is a class, or was already captured; it takes other
            arguments; or it is a function that makes a model.
    """
    if not callable(model):
        hint = ""
        if isinstance(model, str):
            hint = "; the command `offload diagnose` takes files, and names of functions in modules"
        raise DiagnosisError(f"{_EXPECTED}; got a {type(model).__qualname__}{hint}")
    name = callable_name(model)
    if isinstance(model, type):
        raise DiagnosisError(f"{_EXPECTED}; got the class {name} itself: make an instance first")
    if isinstance(model, Captured | Executable):
        raise DiagnosisError(
            f"{_EXPECTED}; got a {name}, which is already captured, so there is nothing to "
            "compare it with: give the model itself"
        )
    _check_arguments(model, name, args, kwargs)
    if not (args or kwargs or isinstance(model, torch.nn.Module)):
        made = model()
        if isinstance(made, tuple) and made and callable(made[0]):
            raise DiagnosisError(
                f"{_EXPECTED}; got the function {name}, which makes a model: give the model, or "
                "the name of the function to the command: `offload diagnose "
                f"package.module:{name}`"
            )


def check_program(name: str, program: Program) -> None:
    """Refuse a model whose call launches nothing, or exchanges tensors with other ranks.

    Raises:
        DiagnosisError: it does.
    """
    if not program.launches:
        raise DiagnosisError(
            f"{_EXPECTED}; a call of {name} with these arguments launches nothing that depends on "
            "tensors"
        )
    refuse_ranks(name, program)


def refuse_ranks(name: str, program: Program) -> None:
    """Refuse a Program that exchanges tensors with other ranks.

    Raises:
        DiagnosisError: it does.
    """
    if program.groups:
        raise DiagnosisError(
            f"{name} exchanges tensors with other ranks, and each rank would choose its own "
            "number of calls to time, while the others wait: time the same number of calls on all "
            "ranks (executable.timeline())"
        )


def _check_arguments(
    model: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that the model's signature does not accept."""
    called = model
    if isinstance(model, torch.nn.Module):
        if model._forward_pre_hooks:  # these may change the arguments
            return
        called = model.forward
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DiagnosisError(
            f"{_EXPECTED}; {name}{signature} cannot be called with these arguments: {error}"
        ) from None
