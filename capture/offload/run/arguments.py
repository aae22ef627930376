"""Match the arguments of a call against those of the recorded call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import BindingError
from offload.native import _native
from offload.program import BoundProgram, Program
from offload.program.constants import is_immutable
from offload.program.structure import TOO_DEEP
from offload.program.structure_match import StructureMismatch, match
from offload.record import is_plain_class

_AGAIN = "a program is recorded for one structure of arguments, capture again for another"

_TICKET = (
    "a ticket stands for its result as an argument of submit, and not inside a container or in a "
    "call: give its result(), or let the function of a task make the container"
)


def plain_places(bound: BoundProgram, sizes: Mapping[int, int]) -> tuple[Any, Any]:
    """The recorded arguments as (is_tensor, constant) pairs, for the native side to compare with.

    Args:
        bound: the program that is called.
        sizes: the constants that are sizes, by their place among the constants of the arguments,
            and their dim; they are (False, None, dim).

    Returns:
        A list of the positional pairs and a dict of the keyword pairs; None for both where only
        `tensors_of_call` can compare: an argument is nested or may change, or the order of keywords
        matters.
    """
    positional, keyword = bound.arguments_structure.children
    parts = (*positional.children, *keyword.children)
    if any(part.children or not is_immutable(part.constant) for part in parts):
        return None, None
    if len(_variadic(bound.program, dict.fromkeys(keyword.keys))) > 1:
        return None, None
    places: list[tuple[Any, ...]] = []
    n_constants = 0
    for part in parts:
        is_tensor = part.kind == "tensor"
        dim = None if is_tensor else sizes.get(n_constants)
        n_constants += not is_tensor
        places.append((is_tensor, part.constant) if dim is None else (False, None, dim))
    n_positional = len(positional.children)
    named = dict(zip(keyword.keys, places[n_positional:], strict=True))
    return places[:n_positional], named


def tensors_of_call(
    bound: BoundProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """List the tensors of a call, however nested, in the order of the program's inputs.

    A parameter may be given by position or by keyword, whichever way it was recorded.

    Raises:
        BindingError: an argument is missing, was absent from the recorded call, or is nested
            differently; or a tensor is of a subclass, which is not recorded.
    """
    args, kwargs = _as_recorded(bound, args, kwargs)
    positional, keyword = bound.arguments_structure.children
    try:
        tensors = [
            *match(positional, args, _is_tensor, "args"),
            *match(keyword, kwargs, _is_tensor, "kwargs"),
        ]
    except StructureMismatch as error:
        advice = _TICKET if isinstance(error.given, _native.Ticket) else _AGAIN
        raise BindingError(f"{error}; {advice}") from None
    except RecursionError:
        raise BindingError(
            f"an argument cannot be matched with the recorded one: {TOO_DEEP}"
        ) from None
    for view, tensor in zip(bound.program.inputs, tensors, strict=True):
        if not is_plain_class(tensor):
            raise BindingError(
                f"{bound.program.values[view.value].name}: expected a plain torch.Tensor, got a "
                f"{type(tensor).__qualname__}, whose special behaviour launches do not have: pass "
                "it .as_subclass(torch.Tensor)"
            )
    return tensors


def _as_recorded(
    bound: BoundProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments by position or keyword as recorded, keywords in recorded order."""
    positional, keyword = bound.arguments_structure.children
    names, n_positional = bound.program.parameter_names, len(positional.children)
    kwargs = dict(kwargs)
    for name in names[: len(args)]:
        if name and name in kwargs:
            raise BindingError(
                f"argument {name} was given both by position and by keyword: give it once"
            )
    for name in names[len(args) : n_positional]:
        if name not in kwargs:
            raise BindingError(f"argument {name or len(args)} is missing: {_MISSING}")
        args = (*args, kwargs.pop(name))
    for name, given in zip(names[n_positional:], args[n_positional:], strict=False):
        if name:
            kwargs[name] = given
    if len(names) >= len(args):
        args = args[:n_positional]
    _check_keywords(bound, kwargs)
    return args, {name: kwargs[name] for name in keyword.keys}


_MISSING = "the recorded call was given it, so pass it too, or capture again without it"
_EXTRA = "the recorded call was not given it, so leave it out, or capture again with it"


def _check_keywords(bound: BoundProgram, kwargs: Mapping[str, Any]) -> None:
    recorded = dict.fromkeys(bound.arguments_structure.children[1].keys)
    for name in recorded:
        if name not in kwargs:
            raise BindingError(f"argument {name} is missing: {_MISSING}")
    for name, given in kwargs.items():
        if name not in recorded:
            what = "a tensor" if _is_tensor(given) else repr(given)
            raise BindingError(f"argument {name}: got {what}, but {_EXTRA}")
    expected, got = _variadic(bound.program, recorded), _variadic(bound.program, kwargs)
    if expected != got:
        raise BindingError(
            f"the keyword arguments {got} go into the model's own **kwargs, which shows it their "
            f"order: pass them as recorded, in the order {expected}, or capture again"
        )


def _variadic(program: Program, keywords: Mapping[str, Any]) -> list[str]:
    """Return the keywords that are not names of parameters, in order."""
    names = {*program.parameter_names, *program.keyword_only_names}
    return [name for name in keywords if name not in names]


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)
