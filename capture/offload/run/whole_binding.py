"""Check the calls of a Program that is executed as segments, before any of them begins."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from offload.interpreter.native_layouts import native_layout
from offload.native import _native
from offload.program import BoundProgram, Role, Value
from offload.run.arguments import plain_places, tensors_of_call
from offload.run.native_replay import host_constants, overlap_specs, weight_spec

_NO_FEATURE_MAP = 0  # a slot that nothing binds


def whole_binding(bound: BoundProgram, rebinding_refusal: str) -> _native.Replay:
    """Return a native object that checks calls as an Executable of the whole Program does.

    It has the inputs and weights of the Program, and neither launches nor results. A segment knows
    only its own inputs and weights: a later one would refuse after earlier ones have begun, and
    none sees that another one writes its input. `surroundings` compares the calling thread with the
    recorded one, `checked` returns the tensors of a call, `check_layouts` and `rebind_weights` are
    those of an Executable; `rebinding_refusal` as of `native_replay`.
    """
    positional, keyword = plain_places(bound, {})
    caller = bound.program.caller
    held = bound.bindings.weights
    weights = [
        one for one in bound.program.of_role(Role.WEIGHT) if one.index in held and not one.on_host
    ]
    return _native.Replay(
        spec=_call_spec(bound, weights, rebinding_refusal),
        triggers=[_native.Trigger.FEATURE_MAP, *(_native.Trigger.WEIGHT for _ in weights)],
        resident=_native.NullResident([], 0, 0, []),
        host_scheduled=False,
        positional=positional,
        keyword=keyword,
        match=functools.partial(tensors_of_call, bound),
        result_form="other",
        build_result=_refuse_execution,
        match_buffers=_refuse_execution,
        check_feature_map=_refuse_execution,
        caller=None if caller is None else (caller.state, bound.bindings.root, caller.training),
    )


def _call_spec(
    bound: BoundProgram, weights: Sequence[Value], rebinding_refusal: str
) -> _native.CallSpec:
    """Return what is checked of a call: inputs, these weights and host constants, no results."""
    program = bound.program
    written = program.written_values
    on = (
        program.device
        if program.device_index is None
        else f"{program.device}:{program.device_index}"
    )
    return _native.CallSpec(
        device=on,
        inputs=[
            _native.InputSpec(
                name=program.values[view.value].name,
                slot=_NO_FEATURE_MAP,
                written=view.value in written,
                on_host=program.values[view.value].on_host,
            )
            for view in program.inputs
        ],
        outputs=[],
        results=[],
        weights=[
            weight_spec(bound, slot, one, {}, is_written=one.index in written)
            for slot, one in enumerate(weights, _NO_FEATURE_MAP + 1)
        ],
        host_constants=list(host_constants(bound)),
        overlaps=overlap_specs(program),
        feature_map_slot=_NO_FEATURE_MAP,
        alignment_bytes=1,
        shapes=_native.CallShapes(
            inputs=[native_layout(view) for view in program.inputs],
            outputs_bytes=[],
            results=[],
            feature_map_bytes=0,
        ),
        rebinding_refusal=rebinding_refusal,
    )


def _refuse_execution(*_: Any) -> NoReturn:
    raise AssertionError("a binding is not executed")
