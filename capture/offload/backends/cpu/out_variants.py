"""Launches whose operator has a variant that computes into given tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from offload.interpreter.torch_names import find_overload, split_operator
from offload.native import _native
from offload.program import Launch


@functools.cache
def _out_overload(operator: str) -> str | None:
    """Return the overload that itself computes `operator` into given tensors.

    Generated out-variants do not count: they call the functional operator and copy.
    """
    if _native.has_thunk(operator):
        return ""
    base = find_overload(operator)
    wanted = [(argument.name, str(argument.type)) for argument in base._schema.arguments]
    if any(str(one.type) != "Tensor" for one in base._schema.returns) or not base._schema.returns:
        return None
    name, _ = split_operator(operator)
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short)
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        outputs = [one for one in arguments if one.kwarg_only and _is_written(one)]
        rest = [(one.name, str(one.type)) for one in arguments if one not in outputs]
        fits = rest == wanted and len(outputs) == len(base._schema.returns)
        if fits and torch.Tag.generated not in candidate.tags:
            return str(overload)
    return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def out_variant(launch: Launch) -> str | None:
    """Return the out overload to prove for a launch (empty: a built-in thunk); else None."""
    made = tuple(launch.made())
    suitable = (
        made
        and len(made) == len(launch.results)
        and not launch.random
        and not launch.guards_shape
        and launch.guard is None
        and set(launch.writes) == {view.value for view in made}
        and not any(view.conjugate or view.negative for view in made)
    )
    return _out_overload(launch.name) if suitable else None
