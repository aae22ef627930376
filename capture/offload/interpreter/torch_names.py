"""The torch objects that a Program names: operators, dtypes and other symbols."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program import Bindings, Symbol


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without its module: `float32`."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> torch.dtype:
    """The dtype with a name from `dtype_name`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise CaptureError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype


def split_operator(operator: str) -> tuple[str, str]:
    """`aten::add.Tensor` as qualified name and overload; the default overload is empty."""
    name, _, overload = operator.partition(".")
    return name, overload


def find_overload(operator: str) -> Any:
    """The torch.ops overload of an operator.

    Raises:
        CaptureError: this torch does not have it.
    """
    name, overload = split_operator(operator)
    namespace, _, base = name.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        raise CaptureError(
            f"operator {operator} does not exist in torch {torch.__version__}"
        ) from None


@functools.cache
def has_own_kernel(operator: str, device_type: str) -> bool:
    """Whether a device type has a kernel of its own for an operator; a fallback does not count."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


@functools.cache
def runs_on(operator: str, device_type: str) -> bool:
    """Whether a device type runs an operator: by its own kernel, or by one for every device.

    A device's fallback does not count, which may execute the operator on the host instead.
    """
    return has_own_kernel(operator, device_type) or any(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) for key in _FOR_EVERY_DEVICE
    )


# Dispatch keys whose kernels serve every device (c10/core/DispatchKey.h, "alias dispatch keys").
# Not CompositeExplicitAutogradNonFunctional: its kernels call an operator's out-variant, which a
# device may lack.
_FOR_EVERY_DEVICE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")


def symbol_object(symbol: Symbol, bindings: Bindings) -> Any:
    """The object that a Symbol of a Program names."""
    if symbol.kind == "generator":
        return bindings.generators[int(symbol.name)]
    return torch_object(symbol)


def torch_object(symbol: Symbol) -> Any:
    """The dtype, device, layout or memory format that a Symbol names."""
    return torch.device(symbol.name) if symbol.kind == "device" else getattr(torch, symbol.name)


def positional_and_named(
    overload: Any, arguments: Sequence[object]
) -> tuple[list[object], dict[str, object]]:
    """Split arguments in schema order into positional and keyword-only ones."""
    positional: list[object] = []
    named: dict[str, object] = {}
    for declared, argument in zip(overload._schema.arguments, arguments, strict=True):
        if declared.kwarg_only:
            named[declared.name] = argument
        else:
            positional.append(argument)
    return positional, named
