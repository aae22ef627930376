"""The native side of a Program: how a call's arguments, results and slots are described to it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Set

import torch

from offload import _native
from offload.arguments import plain_places, tensors_of_call
from offload.backends import Loaded, native_layout
from offload.errors import CaptureError
from offload.plan import Plan, SlotKind
from offload.program import ITEM_BYTES, Program, Role, Value
from offload.structure import Structure, unflatten

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
    positional, keyword = plain_places(program)
    structure = program.result_structure
    return _native.Replay(
        spec=_call_spec(program, plan, loaded),
        triggers=[_TRIGGERS[slot.kind] for slot in plan.slots],
        resident=loaded.resident,
        host_scheduled=host_scheduled,
        positional=positional,
        keyword=keyword,
        match=functools.partial(tensors_of_call, program),
        result_form=_result_form(structure, len(program.results)),
        build_result=lambda tensors: unflatten(structure, tensors),
        current_stream=loaded.current_stream,
        draw=loaded.draw,
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


def _call_spec(program: Program, plan: Plan, loaded: Loaded) -> _native.CallSpec:
    written = {index for launch in program.launches for index in launch.writes}
    return _native.CallSpec(
        device=program.device if loaded.device is None else str(loaded.device),
        inputs=_input_specs(program, plan, written, loaded.alignment_bytes),
        outputs=[
            _native.OutputSpec(
                name=value.name,
                slot=_slot_of(plan, value.index),
                size_bytes=value.size_bytes,
                operator_allocated=value.index in loaded.operator_allocated,
                alignment_bytes=loaded.alignment_bytes,
            )
            for value in program.of_role(Role.OUTPUT)
        ],
        results=_result_specs(program),
        weights=[
            _weight_spec(program, plan, value, value.index in written, loaded.weights)
            for value in program.of_role(Role.WEIGHT)
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


def _slot_of(plan: Plan, value: int) -> int:
    place = plan.places[value]
    if place is None:
        raise CaptureError(f"%{value} has no slot")
    return place.slot


def _input_specs(
    program: Program, plan: Plan, written: Set[int], alignment_bytes: int
) -> list[_native.InputSpec]:
    aliased = {result.view.value for result in program.results if result.input_leaf < 0}
    return [
        _native.InputSpec(
            name=program.values[view.value].name,
            layout=native_layout(view),
            slot=_slot_of(plan, view.value),
            written=view.value in written,
            returned_as_view=view.value in aliased,
            alignment_bytes=alignment_bytes,
        )
        for view in program.inputs
    ]


def _weight_spec(
    program: Program,
    plan: Plan,
    value: Value,
    is_written: bool,
    moved: Mapping[int, torch.Tensor],
) -> _native.WeightSpec:
    views = program.weight_views[value.index]
    if value.index in moved:
        views, holders = views[:1], [moved[value.index]]
    else:
        holders = list(program.weights[value.index])
    return _native.WeightSpec(
        name=value.name,
        slot=_slot_of(plan, value.index),
        size_bytes=value.size_bytes,
        written=is_written,
        holders=holders,
        layouts=[native_layout(view) for view in views],
        offsets=[view.offset_bytes // ITEM_BYTES[view.dtype] for view in views],
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
