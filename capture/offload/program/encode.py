"""Writes a Program as JSON data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from offload.errors import FileError
from offload.program.launch import Argument, Kernel, Launch
from offload.program.plain_structure import TORCH_KINDS
from offload.program.program import Program
from offload.program.structure import Structure
from offload.program.triton_kernels import TritonKernel
from offload.program.values import Symbol, TensorView, Value

FORMAT_NAME = "offload program"
# Of a Program of fixed size, which older versions read, and of one with a Family.
PLAIN_VERSION, FORMAT_VERSION = 1, 2
FAMILY = "family"
GROUPS = "groups"
TRITON = "triton"
"""The key of a launch's kernel, in place of its operator."""

# Arguments and results nested deeper than this are neither written nor read.
MAXIMUM_DEPTH = 64


def encode_program(program: Program) -> dict[str, Any]:
    """Return a Program as JSON data, without the bytes of its weights.

    Raises:
        FileError: a constant among the arguments or in the result cannot be written, or a launch
            draws from a generator other than the default one, or is compiled code.
    """
    return {
        "format": FORMAT_NAME,
        "version": PLAIN_VERSION,
        "device": program.device,
        "versions": dict(program.versions),
        "values": [_value(value) for value in program.values],
        "launches": [_launch(launch) for launch in program.launches],
        "inputs": [_view(view) for view in program.inputs],
        "results": [
            {"view": _view(result.view), "input_leaf": result.input_leaf}
            for result in program.results
        ],
        "arguments_structure": _structure(program.arguments_structure, "arguments", 0),
        "result_structure": _structure(program.result_structure, "result", 0),
        "overlaps": [
            {
                "first": overlap.first,
                "second": overlap.second,
                "distance_bytes": overlap.distance_bytes,
            }
            for overlap in program.overlaps
        ],
        "weights": [
            {"value": index, "holders": [_view(view) for view in views]}
            for index, views in program.weight_views.items()
        ],
        "parameter_names": list(program.parameter_names),
        "keyword_only_names": list(program.keyword_only_names),
        "host_reads": list(program.host_reads),
        **({GROUPS: [dataclasses.asdict(one) for one in program.groups]} if program.groups else {}),
    }


def with_family(data: dict[str, Any], family: dict[str, Any]) -> dict[str, Any]:
    """The data of a Program with that of its Family (`family_data`)."""
    return {**data, "version": FORMAT_VERSION, FAMILY: family}


def _value(value: Value) -> dict[str, Any]:
    content = value.host_content
    return ({} if content is None else {"host_content": content.hex()}) | {
        "role": str(value.role),
        "shape": list(value.shape),
        "strides": list(value.strides),
        "dtype": value.dtype,
        "size_bytes": value.size_bytes,
        "name": value.name,
    }


def _view(view: TensorView) -> dict[str, Any]:
    return ({"requires_grad": True} if view.requires_grad else {}) | {
        "value": view.value,
        "offset_bytes": view.offset_bytes,
        "shape": list(view.shape),
        "strides": list(view.strides),
        "dtype": view.dtype,
        "conjugate": view.conjugate,
        "negative": view.negative,
    }


def _launch(launch: Launch) -> dict[str, Any]:
    where = f"{launch.source}: {launch.name}"
    if isinstance(launch.callee, Kernel):
        raise FileError(
            f"{where} is compiled code, which no file holds: write the program that was fused"
        )
    ranges = {"ranges": list(launch.ranges)} if launch.ranges else {}
    return ranges | {
        **_callee(launch, where),
        "arguments": [_argument(argument, where) for argument in launch.arguments],
        "results": [None if view is None else _view(view) for view in launch.results],
        "reads": list(launch.reads),
        "writes": list(launch.writes),
        "random": launch.random,
        "guard": encode_constant(launch.guard, where),
        "guards_shape": launch.guards_shape,
        "source": launch.source,
    }


def _callee(launch: Launch, where: str) -> dict[str, Any]:
    kernel = launch.callee
    if not isinstance(kernel, TritonKernel):
        return {"operator": launch.name}
    return {
        TRITON: {
            "function": kernel.function,
            "source": kernel.source,
            "signature": [list(one) for one in kernel.signature],
            "constants": [[name, encode_constant(one, where)] for name, one in kernel.constants],
            "divisible": list(kernel.divisible),
            "options": [[name, encode_constant(one, where)] for name, one in kernel.options],
            "grid": list(kernel.grid),
        }
    }


def _argument(argument: Argument, where: str) -> Any:
    if isinstance(argument, TensorView):
        return {"view": _view(argument)}
    if isinstance(argument, Symbol):
        if argument.kind == "generator" and argument.name != "0":
            raise FileError(
                f"{where} draws from a generator of its own, which a file cannot hold: draw from "
                "torch's default generator, or keep the captured program in this process"
            )
        return {"symbol": {"kind": argument.kind, "name": argument.name}}
    if isinstance(argument, tuple):
        return [_argument(item, where) for item in argument]
    return encode_constant(argument, where)


def _structure(structure: Structure, where: str, depth: int) -> dict[str, Any]:
    if depth > MAXIMUM_DEPTH:
        raise FileError(f"{where} is nested deeper than {MAXIMUM_DEPTH} containers: flatten it")
    if structure.kind == "tensor":
        return {"kind": "tensor", "leaf": structure.leaf}
    if structure.kind == "constant":
        return {"kind": "constant", "constant": encode_constant(structure.constant, where)}
    labels = structure.keys or range(len(structure.children))
    return {
        "kind": structure.kind,
        "type_name": structure.type_name,
        "keys": [encode_constant(key, f"a key of {where}") for key in structure.keys],
        "children": [
            _structure(child, f"{where}[{label!r}]", depth + 1)
            for label, child in zip(labels, structure.children, strict=True)
        ],
    }


def encode_constant(constant: Any, where: str) -> Any:
    """A constant as JSON data: plain where JSON has it, an object with one key otherwise.

    Raises:
        FileError: it is not None, a bool, int, float, complex, str, a Symbol of torch's dtype,
            device, layout or memory_format, or a tuple of these.
    """
    kind = type(constant)
    if constant is None or kind in (bool, str):
        return constant
    if kind is int and -(2**63) <= constant < 2**63:
        return constant
    if kind is float:
        return constant if math.isfinite(constant) else {"float": repr(constant)}
    if kind is complex:
        parts = [constant.real, constant.imag]
        return {"complex": [encode_constant(part, where) for part in parts]}
    if kind is tuple:
        return {"tuple": [encode_constant(item, where) for item in constant]}
    if isinstance(constant, Symbol) and constant.kind in TORCH_KINDS:
        return {constant.kind: constant.name}
    found = constant.name if isinstance(constant, Symbol) else f"{kind.__module__}.{kind.__name__}"
    raise FileError(
        f"{where} is a {found}, which a file cannot hold: capture "
        "the model with tensors, numbers, strings and None there, for example by closing over the "
        "object instead of passing it"
    )
