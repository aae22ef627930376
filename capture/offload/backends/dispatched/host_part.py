"""Size constants in two parts: integers and booleans on the host, the rest on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.interpreter.settled_family import SizeConstants, part_of
from offload.program import Launch, Operator, Program, Symbol

# Operators whose results on integers and booleans are the same on every device. Excluded are those
# that break ties (sort, topk, argmax), and divisions, where a divisor of 0 is an error on the host.
_EXACT = frozenset(
    f"aten::{name}"
    for name in (
        "abs", "add.Scalar", "add.Tensor", "all", "all.dim", "any", "any.dim", "arange",
        "arange.start", "arange.start_step", "bitwise_and.Scalar", "bitwise_and.Tensor",
        "bitwise_not", "bitwise_or.Scalar", "bitwise_or.Tensor", "bitwise_xor.Scalar",
        "bitwise_xor.Tensor", "cat", "clamp", "clamp_max", "clamp_min", "clone",
        "constant_pad_nd", "cumsum", "eq.Scalar", "eq.Tensor", "eye", "eye.m", "fill.Scalar",
        "flip", "full", "full_like", "gather", "ge.Scalar", "ge.Tensor", "gt.Scalar", "gt.Tensor",
        "index_select", "le.Scalar", "le.Tensor", "logical_and", "logical_not", "logical_or",
        "logical_xor", "lt.Scalar", "lt.Tensor", "masked_fill.Scalar", "maximum", "minimum",
        "mul.Scalar", "mul.Tensor", "ne.Scalar", "ne.Tensor", "neg", "new_full", "new_ones",
        "new_zeros", "ones", "ones_like", "repeat", "roll", "rsub.Scalar", "scalar_tensor",
        "stack", "sub.Scalar", "sub.Tensor", "sum", "sum.dim_IntList", "_to_copy", "tril",
        "tril_indices", "triu", "triu_indices", "where.ScalarOther", "where.ScalarSelf",
        "where.self", "zeros", "zeros_like",
    )
)  # fmt: skip

_EXACT_DTYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64"))


@dataclasses.dataclass(frozen=True, slots=True)
class SplitConstants:
    """Size constants in two parts.

    Attributes:
        on_host: the host's part, as a Program on the CPU.
        on_device: the rest, and all results.
        copied: the Value in `on_device` of each result of `on_host`.
    """

    on_host: SizeConstants
    on_device: SizeConstants
    copied: tuple[int, ...]


def split_constants(constants: SizeConstants) -> SplitConstants | None:
    """Split size constants; None where the host has no part."""
    program = constants.program
    host = _host_launches(program, constants.weights)
    made = {view.value for launch in host for view in launch.made()}
    rest = [one for one in program.launches if one not in host]
    needed = {index for one in rest for index in one.reads} | {*constants.results}
    copied = sorted(made & needed)
    if not copied:
        return None
    on_host, host_positions = part_of(_on_cpu(program), [_launch_on_cpu(one) for one in host])
    on_device, positions = part_of(program, rest, also={*copied, *constants.results})
    return SplitConstants(
        SizeConstants(
            on_host,
            tuple(host_positions[one] for one in copied),
            {
                host_positions[index]: tensor.cpu()
                for index, tensor in constants.weights.items()
                if index in host_positions
            },
        ),
        SizeConstants(
            on_device,
            tuple(positions[one] for one in constants.results),
            {
                positions[index]: tensor
                for index, tensor in constants.weights.items()
                if index in positions
            },
        ),
        tuple(positions[one] for one in copied),
    )


def whole_on_host(constants: SizeConstants) -> SplitConstants:
    """Compute everything on the host, for a device that runs no operators of torch."""
    program = constants.program
    launches = [_launch_on_cpu(launch) for launch in program.launches]
    on_host, host_positions = part_of(_on_cpu(program), launches)
    on_device, positions = part_of(program, (), also={*constants.results})
    results = tuple(positions[one] for one in constants.results)
    return SplitConstants(
        SizeConstants(
            on_host,
            tuple(host_positions[one] for one in constants.results),
            {host_positions[index]: one.cpu() for index, one in constants.weights.items()},
        ),
        SizeConstants(on_device, results, {}),
        results,
    )


def _host_launches(program: Program, weights: Mapping[int, torch.Tensor]) -> list[Launch]:
    """Return launches on integers and booleans that need no result of the device."""
    known = {index for index in weights if program.values[index].dtype in _EXACT_DTYPES}
    found = []
    for launch in program.launches:
        if _is_exact(launch) and known.issuperset(launch.reads):
            found.append(launch)
            known.update(view.value for view in launch.made())
    return found


def _is_exact(launch: Launch) -> bool:
    views = [*launch.views(), *launch.made()]
    return (
        isinstance(launch.callee, Operator)
        and launch.name in _EXACT
        and set(launch.writes) == {view.value for view in launch.made()}
        and all(view.dtype in _EXACT_DTYPES for view in views)
        and not any(isinstance(one, float) for one in _scalars(launch.arguments))
    )


def _scalars(arguments: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for one in arguments:
        flat += _scalars(one) if isinstance(one, tuple) else [one]
    return flat


def _on_cpu(program: Program) -> Program:
    return dataclasses.replace(program, device="cpu", device_index=None)


def _launch_on_cpu(launch: Launch) -> Launch:
    arguments = tuple(
        Symbol("device", "cpu") if isinstance(one, Symbol) and one.kind == "device" else one
        for one in launch.arguments
    )
    return dataclasses.replace(launch, arguments=arguments)
