"""Writes a Program as JSON data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.constants import Content
from offload.errors import FileError
from offload.program import Argument, Launch, Program, Symbol, TensorView, Value
from offload.structure import Structure

FORMAT_NAME = "offload program"
FORMAT_VERSION = 1

# Arguments and results nested deeper than this are neither written nor read.
MAXIMUM_DEPTH = 64

# Objects of torch that stand for themselves as a constant, by the key that marks them.
_NAMED_CONSTANTS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def encode_program(program: Program, holders: Mapping[int, Sequence[TensorView]]) -> dict[str, Any]:
    """Everything in a Program but the bytes of its weights, as JSON data.

    Args:
        program: what is written.
        holders: for each weight Value how the tensors that hold it view its bytes.

    Raises:
        FileError: a constant among the arguments or in the result cannot be written, or a launch
            draws from a generator of its own.
    """
    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
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
            for index, views in holders.items()
        ],
        "parameter_names": list(program.parameter_names),
        "keyword_only_names": list(program.keyword_only_names),
        "host_reads": list(program.host_reads),
    }


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
    return {
        "value": view.value,
        "offset_bytes": view.offset_bytes,
        "shape": list(view.shape),
        "strides": list(view.strides),
        "dtype": view.dtype,
        "conjugate": view.conjugate,
        "negative": view.negative,
    }


def _launch(launch: Launch) -> dict[str, Any]:
    where = f"{launch.source}: {launch.operator}"
    return {
        "operator": launch.operator,
        "arguments": [_argument(argument, where) for argument in launch.arguments],
        "results": [None if view is None else _view(view) for view in launch.results],
        "reads": list(launch.reads),
        "writes": list(launch.writes),
        "random": launch.random,
        "guard": encode_constant(launch.guard, where),
        "guards_shape": launch.guards_shape,
        "source": launch.source,
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
        FileError: it is none of None, bool, int, float, complex, str, dtype, device, layout,
            memory_format, and tuples of these.
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
    for key, named in _NAMED_CONSTANTS.items():
        if isinstance(constant, named):
            return {key: str(constant).removeprefix("torch.")}
    if isinstance(constant, Content):
        kind = constant.cls
    raise FileError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a file cannot hold: capture "
        "the model with tensors, numbers, strings and None there, for example by closing over the "
        "object instead of passing it"
    )
