"""Which operators a program from a file may launch, and with which arguments.

A launch reaches memory only through its tensor arguments and results, so an operator is safe if its
schema declares everything that it touches. These rules follow:

1. It is one of torch's (namespace `aten` or `prims`): others may not exist in the next process, and
   looking them up could import code.
2. It changes no tensor's storage, shape or strides in place: torch tags these operators
   `inplace_view`; their functional and out= forms are refused too.
3. It returns no alias of an argument that it does not write. Views are folded into the views of a
   Program, so view operators are never recorded; in a file they could reach arbitrary memory.
4. Every argument is of a kind that a Program holds: tensors, numbers, strings, symbols. This
   excludes storages, streams and script objects.
5. It makes or writes tensors, reads a tensor on the host for a guard, or is one of torch's
   assertions. All others act on the process: gradients, plan caches, the terminal.
6. It is not one of the few whose schema hides their effects (`_REFUSED`).
7. In addition, collectives (`_c10d_functional`) are allowed: they send tensors to process groups
   that this process has made itself, found by name at the load. The shapes of their results are
   compared with the Program's before they are executed (native/cpu/collectives.cpp).

torch does not always check all arguments of its kernels. The rules keep a file from reaching files,
sockets, processes and addresses; they cannot rule out errors in torch's kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.errors import FileError, ProgramError
from offload.program import Argument, Launch, Symbol, TensorView
from offload.program.collectives import NAMESPACE, STARTS, WAIT

_NAME = re.compile(r"(aten|prims)::([A-Za-z_]\w*)(?:\.(\w+))?", re.ASCII)

_ASSERTIONS = frozenset(
    {
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "_linalg_check_errors",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)

# By name without the in-place underscore, for all overloads.
_REFUSED = frozenset(
    {
        "from_file",  # maps a file
        "_resize_output",  # a resize that torch does not tag
        "set_data",  # swaps the storage
        "_lazy_clone",  # shares memory until it is written
        "pin_memory",
        "_pin_memory",  # starts a device's driver
        "requires_grad",
        "retain_grad",
        "_backward",  # runs autograd
        "_cummax_helper",
        "_cummin_helper",  # rely on their callers' checks of sizes
    }
)


def check_operator(launch: Launch, where: str) -> None:
    """Check that a launch's operator is safe and fits its arguments, results and guard.

    Raises:
        FileError: the operator breaks a rule above, or this torch does not have it.
        ProgramError: it takes other arguments, or returns something else.
    """
    schema = find_safe_operator(launch.name)._schema
    if len(launch.arguments) != len(schema.arguments):
        raise ProgramError(
            f"{where}: {launch.name} takes {len(schema.arguments)} arguments, "
            f"{len(launch.arguments)} are given"
        )
    for declared, argument in zip(schema.arguments, launch.arguments, strict=True):
        if launch.is_collective and declared.name == "group_name":
            if not isinstance(argument, str):
                raise ProgramError(f"{where}: {launch.name} names no group, but {argument}")
            continue
        if not _fits(declared.real_type, argument):
            raise ProgramError(
                f"{where}: {launch.name} takes a {declared.real_type} as {declared.name}, "
                f"{argument} is given"
            )
        if _is_write(declared) and not _values_of(argument) <= set(launch.writes):
            raise ProgramError(
                f"{where}: {launch.name} writes {declared.name}, which is not listed as written"
            )
    _check_results(launch, schema, where)


def _check_results(launch: Launch, schema: Any, where: str) -> None:
    returns = schema.returns
    has_list = any(isinstance(one.type, torch.ListType) for one in returns)
    if len(launch.results) < len(returns) or (len(launch.results) > len(returns) and not has_list):
        raise ProgramError(
            f"{where}: {launch.name} returns {len(returns)} results, "
            f"{len(launch.results)} are listed"
        )
    if not has_list:
        for declared, view in zip(returns, launch.results, strict=True):
            if view is not None and (str(declared.type) != "Tensor" or _is_write(declared)):
                raise ProgramError(f"{where}: {launch.name} makes no new tensor as that result")
    reads_host = bool(returns) and not any("Tensor" in str(one.type) for one in returns)
    if reads_host and type(launch.guard) not in _GUARDS.get(str(returns[0].type), ()):
        raise ProgramError(
            f"{where}: {launch.name} reads a {returns[0].type} on the host, and {launch.guard!r} "
            "is not such a value"
        )
    if not reads_host and launch.guard is not None:
        raise ProgramError(f"{where}: {launch.name} reads nothing on the host to be guarded")


_GUARDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float,),
    "number": (bool, int, float, complex),
}


@functools.cache
def find_safe_operator(name: str) -> Any:
    """The torch.ops overload of an operator that a file may name.

    Raises:
        FileError: this torch does not have it, or it is not safe; the message names the rule.
    """
    if name in STARTS or name == WAIT:
        return _find_collective(name)
    match = _NAME.fullmatch(name)
    if match is None:
        raise FileError(
            f"operator {name!r} is not torch's own, and a file can hold only those of the "
            "namespaces aten and prims: express it with torch operators, and capture again"
        )
    if not _exists(name):
        raise FileError(
            f"operator {name} does not exist in torch {torch.__version__}: open the file with the "
            "version of torch that recorded it"
        )
    namespace, base, overload = match.groups()
    packet = getattr(getattr(torch.ops, namespace), base)
    found = getattr(packet, overload or "default")
    reason = _unsafe_because(base.rstrip("_"), found)
    if reason:
        raise FileError(f"operator {name} is refused: {reason}")
    return found


def _find_collective(name: str) -> Any:
    packet = getattr(torch.ops._c10d_functional, name.removeprefix(NAMESPACE), None)
    if packet is None:
        raise FileError(
            f"operator {name} does not exist in torch {torch.__version__}: open the file with the "
            "version of torch that recorded it"
        )
    return packet.default


def _exists(name: str) -> bool:
    """Whether the dispatcher knows it; torch.ops also resolves names that only TorchScript has."""
    try:
        return torch._C._dispatch_has_kernel(name)
    except RuntimeError:
        return False  # an impossible name, such as the overload `default`


def _unsafe_because(family: str, found: Any) -> str:
    """Why an operator is unsafe; empty if it is not."""
    schema = found._schema
    if family in _REFUSED:
        return "it acts on more than its tensors"
    if torch.Tag.inplace_view in found.tags or _has_inplace_view(family):
        return "it changes a tensor's storage, shape or strides"
    if any(one.alias_info is not None and not _is_write(one) for one in schema.returns):
        return "it returns a view, and a program holds views without launches"
    if not all(_kind_of(one.real_type) in _KINDS for one in schema.arguments):
        return "it takes something that a program cannot hold"
    touches_tensors = any("Tensor" in str(one.type) for one in schema.returns) or any(
        _is_write(one) for one in schema.arguments
    )
    reads_host = torch.Tag.data_dependent_output in found.tags
    if not touches_tensors and not reads_host and family not in _ASSERTIONS:
        return "it neither makes, writes nor reads a tensor"
    return ""


def _has_inplace_view(family: str) -> bool:
    packet = getattr(torch.ops.aten, f"{family}_", None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(
        torch.Tag.inplace_view in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _is_write(declared: Any) -> bool:
    return declared.alias_info is not None and declared.alias_info.is_write


def _values_of(argument: Argument) -> set[int]:
    items = argument if isinstance(argument, tuple) else (argument,)
    return {item.value for item in items if isinstance(item, TensorView)}


# ---- arguments and schema types -----------------------------------------------------------------


def _kind_of(declared: Any) -> str:
    """The name of a schema type below `Optional` and `List`."""
    while isinstance(declared, (torch.OptionalType, torch.ListType)):
        declared = declared.getElementType()
    return str(declared)


def _fits(declared: Any, argument: Argument) -> bool:
    if isinstance(declared, torch.OptionalType):
        return argument is None or _fits(declared.getElementType(), argument)
    if isinstance(declared, torch.ListType):
        element = declared.getElementType()
        return isinstance(argument, tuple) and all(_fits(element, item) for item in argument)
    return _KINDS[_kind_of(declared)](argument)


def _one_of(*types: type) -> Callable[[Argument], bool]:
    return lambda argument: type(argument) in types


def _symbol(kind: str) -> Callable[[Argument], bool]:
    return lambda argument: isinstance(argument, Symbol) and argument.kind == kind


_KINDS: Mapping[str, Callable[[Argument], bool]] = {
    # A number in place of a declared tensor is recorded as a number.
    "Tensor": _one_of(TensorView, bool, int, float, complex),
    "int": _one_of(int),
    "float": _one_of(float, int),
    "bool": _one_of(bool),
    "number": _one_of(bool, int, float, complex),
    "str": _one_of(str),
    "ScalarType": _symbol("dtype"),
    "Layout": _symbol("layout"),
    "MemoryFormat": _symbol("memory_format"),
    "Device": _symbol("device"),
    "Generator": _symbol("generator"),
}
