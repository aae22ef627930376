"""The native side of a Program: the description of a call's arguments, results and slots."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from offload.backends import Loaded, result_source, slot_triggers
from offload.console.user_code import level_of_user
from offload.interpreter.native_layouts import native_layout
from offload.native import _native
from offload.plan import MovingSlot, Plan
from offload.program import (
    ITEM_BYTES,
    BoundProgram,
    Program,
    Role,
    TensorView,
    Value,
    is_dense,
    span_bytes,
)
from offload.program.structure import Structure, unflatten
from offload.run.arguments import plain_places, tensors_of_call
from offload.run.buffers import buffers_of


def native_replay(
    bound: BoundProgram,
    plan: Plan,
    loaded: Loaded,
    *,
    host_scheduled: bool,
    copied: Set[int],
    check_feature_map: Callable[[object], None],
    rebinding_refusal: str,
    sizes: SizedCalls | None = None,
) -> _native.Replay:
    """Return the native object that executes a loaded Program.

    `copied`: the slots that are copied. `check_feature_map` refuses anything but tensors, and
    everything where the feature map does not move. `rebinding_refusal`: why weights cannot be
    rebound, and what to do instead; empty if they can. `sizes`: what is known of calls whose sizes
    vary.
    """
    program = bound.program
    positional, keyword = plain_places(bound, {} if sizes is None else sizes.constants)
    structure, streams = bound.result_structure, loaded.streams

    def build_result(tensors: list[torch.Tensor], *found: tuple[int, ...]) -> Any:
        nesting = sizes.results(*found) if sizes is not None else structure
        return unflatten(nesting, tensors)

    return _native.Replay(
        spec=_call_spec(bound, plan, loaded, copied, rebinding_refusal),
        triggers=slot_triggers(plan),
        resident=loaded.resident,
        host_scheduled=host_scheduled,
        positional=positional,
        keyword=keyword,
        match=functools.partial(tensors_of_call, bound) if sizes is None else sizes.match,
        result_form=_result_form(structure, len(program.results)),
        build_result=build_result,
        match_buffers=functools.partial(buffers_of, structure, len(program.results)),
        check_feature_map=check_feature_map,
        current_stream=None if streams is None else streams.current,
        draw=loaded.draw,
        drains_queue=streams is not None and streams.drains_queue,
        caller=_caller(bound, loaded),
        warn_of_gradients=_warn_of_gradients if _trained(program) else None,
        sizes=None
        if sizes is None
        else (sizes.instances, sizes.axes, sizes.find, sizes.promotions),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SizedCalls:
    """What is known of calls whose sizes vary.

    Attributes:
        instances: gives the numbers of each choice of sizes.
        axes: which axes of tensors give sizes: (dim, input, axis).
        constants: which integers do: the dim, by their place among the constants of the arguments.
        find: (args, kwargs): the sizes of a call that gives them in another way.
        match: (args, kwargs): the tensors of a call.
        results: (sizes): how the result is nested.
        promotions: which sizes have their own executable; None where no sizes will.
    """

    instances: _native.Instances
    axes: list[tuple[int, int, int]]
    constants: Mapping[int, int]
    find: Callable[[tuple[Any, ...], dict[str, Any]], Sequence[int]]
    match: Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor]]
    results: Callable[[tuple[int, ...]], Structure]
    promotions: _native.Promotions | None = None


def _caller(
    bound: BoundProgram, loaded: Loaded
) -> tuple[int, Callable[[], object] | None, bool] | None:
    """Return the recorded caller; None where the device's type differs from the recording's."""
    program = bound.program
    caller = program.caller
    if caller is None or (loaded.device and loaded.device.type != program.device):
        return None
    return caller.state, bound.bindings.root, caller.training


def _trained(program: Program) -> bool:
    return program.caller is not None and program.caller.training


def _warn_of_gradients() -> None:
    warnings.warn(
        "executions record no gradients, and the model's weights require them: the model was in "
        "training mode when it was recorded. Train it in eager; to execute without this warning, "
        "call under torch.no_grad(), or capture the model after .eval()",
        stacklevel=level_of_user(),
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


def _call_spec(
    bound: BoundProgram, plan: Plan, loaded: Loaded, copied: Set[int], rebinding_refusal: str
) -> _native.CallSpec:
    program = bound.program
    written = {index for launch in program.launches for index in launch.writes}
    packed = program.packed_weights
    return _native.CallSpec(
        device=program.device if loaded.device is None else str(loaded.device),
        inputs=_input_specs(program, plan, written, loaded.alignment_bytes, copied),
        outputs=[
            _native.OutputSpec(
                name=value.name,
                slot=plan.slot_of(value.index),
                operator_allocated=value.index in loaded.operator_allocated,
                alignment_bytes=loaded.alignment_bytes,
                copied=plan.slot_of(value.index) in copied,
            )
            for value in program.of_role(Role.OUTPUT)
        ],
        results=_result_specs(bound, loaded),
        weights=[
            weight_spec(
                bound,
                plan.slot_of(value.index),
                value,
                loaded.weights.tensors,
                is_written=value.index in written,
                is_packed=value.index in packed,
            )
            for value in _device_weights(bound, loaded)
        ],
        host_constants=list(host_constants(bound)),
        overlaps=overlap_specs(program),
        feature_map_slot=plan.feature_map.index,
        alignment_bytes=plan.alignment_bytes,
        shapes=_call_shapes(program, plan),
        rebinding_refusal=rebinding_refusal,
    )


def _call_shapes(program: Program, plan: Plan) -> _native.CallShapes:
    alone = outputs_shown_once(program)
    return _native.CallShapes(
        inputs=[native_layout(view) for view in program.inputs],
        outputs_bytes=[value.size_bytes for value in program.of_role(Role.OUTPUT)],
        results=[
            _native.ResultShape(
                offset_bytes=result.view.offset_bytes,
                layout=native_layout(result.view),
                covers_output=result.view.value in alone and _is_whole(program, result.view),
            )
            for result in program.results
        ],
        feature_map_bytes=plan.feature_map_bytes,
    )


def _is_whole(program: Program, view: TensorView) -> bool:
    n_bytes = math.prod(view.shape) * ITEM_BYTES[view.dtype]
    return view.offset_bytes == 0 and n_bytes == program.values[view.value].size_bytes


def outputs_shown_once(program: Program) -> frozenset[int]:
    """Return the outputs that exactly one result shows."""
    counted = Counter(result.view.value for result in program.results)
    return frozenset(
        value.index for value in program.of_role(Role.OUTPUT) if counted[value.index] == 1
    )


def moving_slots(program: Program, plan: Plan, loaded: Loaded) -> list[MovingSlot]:
    """Return the slots of inputs and outputs, and which of them may be copied.

    Inputs that overlap and of which one is written are not copied: they are bound in place, as
    recorded. Nor is an input with gaps or shared elements, which a copy of bytes cannot reproduce.
    An input that is written, or may be by unseen work, is copied back; a result that is an input or
    its view is made from the caller's tensor, copied or not.
    """
    written = program.written_values
    together = {leaf for one in program.overlaps for leaf in (one.first, one.second)}
    nodes = {} if loaded.set_nodes is None else loaded.set_nodes.of_slot
    slots = []
    for leaf, view in enumerate(program.inputs):
        if program.values[view.value].on_host:
            continue
        may_copy = leaf not in together and is_dense(view.shape, view.strides)
        n_copies = (2 if view.value in written else 1) if may_copy else 0
        slot = plan.slot_of(view.value)
        size_bytes = span_bytes(view.shape, view.strides, view.dtype)
        slots.append(MovingSlot(slot, size_bytes, n_copies, nodes.get(slot, set())))
    for value in program.of_role(Role.OUTPUT):
        slot = plan.slot_of(value.index)
        n_copies = int(value.index not in loaded.operator_allocated)
        slots.append(MovingSlot(slot, value.size_bytes, n_copies, nodes.get(slot, set())))
    return slots


def _input_specs(
    program: Program, plan: Plan, written: Set[int], alignment_bytes: int, copied: Set[int]
) -> list[_native.InputSpec]:
    aliased = {result.view.value for result in program.results if result.input_leaf < 0}
    return [
        _native.InputSpec(
            name=program.values[view.value].name,
            slot=0 if on_host else plan.slot_of(view.value),
            written=view.value in written,
            may_be_written=program.opaque is not None and not on_host,
            returned_as_view=view.value in aliased,
            alignment_bytes=1 if on_host else alignment_bytes,
            on_host=on_host,
            copied=not on_host and plan.slot_of(view.value) in copied,
        )
        for view in program.inputs
        for on_host in [program.values[view.value].on_host]
    ]


def _device_weights(bound: BoundProgram, loaded: Loaded) -> list[Value]:
    """The weights on the device that objects hold; the device itself holds constants of sizes."""
    held = bound.bindings.weights.keys() | loaded.weights.tensors.keys()
    weights = bound.program.of_role(Role.WEIGHT)
    return [value for value in weights if not value.on_host and value.index in held]


def overlap_specs(program: Program) -> list[_native.OverlapSpec]:
    """Return the inputs that share memory, as the native side takes them."""
    return [
        _native.OverlapSpec(first=one.first, second=one.second, distance_bytes=one.distance_bytes)
        for one in program.overlaps
    ]


def host_constants(bound: BoundProgram) -> Iterator[_native.HostConstantSpec]:
    """Yield the tensors on the host that executions must find as recorded: inputs, held tensors."""
    program = bound.program
    for leaf, view in enumerate(program.inputs):
        value = program.values[view.value]
        if value.host_content is not None:
            yield _native.HostConstantSpec(
                name=value.name,
                content=value.host_content,
                layout=native_layout(view),
                input=leaf,
            )
    for value in program.of_role(Role.WEIGHT):
        if value.host_content is None:
            continue
        for holder, view in zip(
            bound.bindings.weights[value.index], program.weight_views[value.index], strict=True
        ):
            yield _native.HostConstantSpec(
                name=value.name,
                content=value.host_content[view.offset_bytes : view.end_bytes],
                layout=native_layout(view),
                holder=holder,
            )


def weight_spec(
    bound: BoundProgram,
    slot: int,
    value: Value,
    moved: Mapping[int, torch.Tensor],
    *,
    is_written: bool,
    is_packed: bool = False,
) -> _native.WeightSpec:
    """Describe a weight in a slot; `moved`: where launches find weights that lie elsewhere."""
    views, place = bound.program.weight_views[value.index], moved.get(value.index)
    holders = list(bound.bindings.weights.get(value.index, ()))
    if place is not None and not holders:  # its content is in a file
        views, holders, place = views[:1], [place], None
    return _native.WeightSpec(
        name=value.name,
        slot=slot,
        size_bytes=value.size_bytes,
        written=is_written,
        holders=holders,
        layouts=[native_layout(view) for view in views],
        offsets=[view.offset_bytes // ITEM_BYTES[view.dtype] for view in views],
        packed=is_packed and value.index not in moved,
        moved=place,
    )


def _result_specs(bound: BoundProgram, loaded: Loaded) -> list[_native.ResultSpec]:
    program = bound.program
    indices = {
        Role.INPUT: [view.value for view in program.inputs],
        Role.WEIGHT: [value.index for value in _device_weights(bound, loaded)],
        Role.OUTPUT: [value.index for value in program.of_role(Role.OUTPUT)],
    }
    specs = []
    for result in program.results:
        value = program.values[result.view.value]
        specs.append(
            _native.ResultSpec(
                source=result_source(value.role),
                index=indices[value.role].index(value.index),
                is_argument=result.input_leaf >= 0,
            )
        )
    return specs
