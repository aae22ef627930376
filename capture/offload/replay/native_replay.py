"""The native side of a Program: how a call's arguments, results and slots are described to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from offload import _native
from offload.backends import Loaded, native_layout
from offload.errors import BindingError, CaptureError
from offload.plan import Plan, SlotKind
from offload.program import ITEM_BYTES, Program, Role
from offload.structure import Structure, StructureMismatch, is_immutable, match, unflatten

_TRIGGERS = {
    SlotKind.INPUT: _native.Trigger.IO,
    SlotKind.OUTPUT: _native.Trigger.IO,
    SlotKind.WEIGHT: _native.Trigger.WEIGHT,
    SlotKind.FEATURE_MAP: _native.Trigger.FEATURE_MAP,
    SlotKind.OPERATOR: _native.Trigger.INTERNAL,
}


def native_replay(
    program: Program, plan: Plan, loaded: Loaded, *, host_scheduled: bool
) -> _native.Replay:
    """The native object that executes a loaded Program."""
    positional, keyword = _plain_places(program.arguments_structure)
    structure = program.result_structure
    return _native.Replay(
        spec=_call_spec(program, plan, loaded.operator_allocated),
        triggers=[_TRIGGERS[slot.kind] for slot in plan.slots],
        resident=loaded.resident,
        host_scheduled=host_scheduled,
        positional=positional,
        keyword=keyword,
        match=_matcher(program),
        result_form=_result_form(structure, len(program.results)),
        build_result=lambda tensors: unflatten(structure, tensors),
    )


def _result_form(structure: Structure, n_results: int) -> str:
    """`tensor`, `list` or `tuple` where the native side can build the result, else `other`."""
    if structure.kind == "tensor":
        return "tensor"
    leaves = [child.leaf for child in structure.children]
    plain = structure.kind in ("list", "tuple") and leaves == list(range(n_results))
    if plain and structure.container in (list, tuple, None):
        return structure.kind
    return "other"


def _plain_places(structure: Structure) -> tuple[Any, Any]:
    """The arguments as (is_tensor, constant) pairs; None where any is nested or may change."""
    positional, keyword = structure.children
    parts = (*positional.children, *keyword.children)
    if any(part.children or not is_immutable(part.constant) for part in parts):
        return None, None
    places = [(child.kind == "tensor", child.constant) for child in positional.children]
    named = {
        key: (child.kind == "tensor", child.constant)
        for key, child in zip(keyword.keys, keyword.children, strict=True)
    }
    return places, named


def _matcher(program: Program) -> Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor]]:
    """Lists the tensors of a call, however nested; positional and keyword are interchangeable."""
    structure = program.arguments_structure
    n_positional = len(structure.children[0].children)
    names = program.parameter_names

    def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        kwargs = dict(kwargs)
        for name in names[: len(args)]:
            if name and name in kwargs:
                raise BindingError(f"{name} was given both by position and by keyword")
        for name in names[len(args) : n_positional]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        for name, given in zip(names[n_positional:], args[n_positional:], strict=False):
            if name:
                kwargs[name] = given
        if len(names) >= len(args):
            args = args[:n_positional]
        try:
            return match(structure, (args, kwargs), _is_tensor, "arguments")
        except StructureMismatch as error:
            raise BindingError(
                f"{error}; a program is recorded for one structure of arguments, capture again "
                "for another"
            ) from None

    return tensors


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)


def _call_spec(
    program: Program, plan: Plan, operator_allocated: frozenset[int]
) -> _native.CallSpec:
    written = {index for launch in program.launches for index in launch.writes}
    aliased = {result.view.value for result in program.results if result.input_leaf < 0}

    def slot_of(value: int) -> int:
        place = plan.places[value]
        if place is None:
            raise CaptureError(f"%{value} has no slot")
        return place.slot

    outputs = program.of_role(Role.OUTPUT)
    weights = program.of_role(Role.WEIGHT)
    return _native.CallSpec(
        device="cpu" if program.device == "cpu" else program.device,
        inputs=[
            _native.InputSpec(
                name=program.values[view.value].name,
                layout=native_layout(view),
                slot=slot_of(view.value),
                written=view.value in written,
                returned_as_view=view.value in aliased,
            )
            for view in program.inputs
        ],
        outputs=[
            _native.OutputSpec(
                name=value.name,
                slot=slot_of(value.index),
                size_bytes=value.size_bytes,
                operator_allocated=value.index in operator_allocated,
            )
            for value in outputs
        ],
        results=_result_specs(program),
        weights=[
            _native.WeightSpec(
                name=value.name,
                slot=slot_of(value.index),
                size_bytes=value.size_bytes,
                written=value.index in written,
                holders=list(program.weights[value.index]),
                layouts=[native_layout(view) for view in program.weight_views[value.index]],
                offsets=[
                    view.offset_bytes // ITEM_BYTES[view.dtype]
                    for view in program.weight_views[value.index]
                ],
            )
            for value in weights
        ],
        overlaps=[
            _native.OverlapSpec(
                first=one.first, second=one.second, distance_bytes=one.distance_bytes
            )
            for one in program.overlaps
        ],
        feature_map_slot=plan.feature_map.index,
        feature_map_bytes=plan.feature_map_bytes,
        alignment_bytes=plan.alignment_bytes,
    )


def _result_specs(program: Program) -> list[_native.ResultSpec]:
    sources = {
        Role.INPUT: (_native.ResultSource.INPUT, [view.value for view in program.inputs]),
        Role.WEIGHT: (_native.ResultSource.WEIGHT, _indices(program, Role.WEIGHT)),
        Role.OUTPUT: (_native.ResultSource.OUTPUT, _indices(program, Role.OUTPUT)),
    }
    n_of_value: dict[int, int] = {}
    for result in program.results:
        n_of_value[result.view.value] = n_of_value.get(result.view.value, 0) + 1
    specs = []
    for result in program.results:
        value = program.values[result.view.value]
        source, indices = sources[value.role]
        n_bytes = math.prod(result.view.shape) * ITEM_BYTES[result.view.dtype]
        covers = result.view.offset_bytes == 0 and n_bytes == value.size_bytes
        specs.append(
            _native.ResultSpec(
                source=source,
                index=indices.index(value.index),
                offset_bytes=result.view.offset_bytes,
                layout=native_layout(result.view),
                is_argument=result.input_leaf >= 0,
                covers_output=covers and n_of_value[value.index] == 1,
            )
        )
    return specs


def _indices(program: Program, role: Role) -> list[int]:
    return [value.index for value in program.of_role(role)]
