"""Programs for another device than the recorded one: what may run there, and what it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from offload.interpreter.torch_names import find_overload, runs_on
from offload.program import (
    Argument,
    BoundProgram,
    Launch,
    Operator,
    Program,
    Symbol,
    check_program,
)

# Make, or ask about, host memory that devices copy from: nothing of a device's own.
_PINNING = frozenset(("aten::pin_memory", "aten::_pin_memory", "aten::is_pinned"))


def why_not_on(program: Program, launch: Launch, device_type: str) -> str:
    """Why a launch must stay on the recorded device; empty if a device of this type can run it.

    Launches that draw random numbers, end an execution or write the caller's memory stay whatever
    this says (`plan.program_tasks.staying_launches`).
    """
    if not isinstance(launch.callee, Operator):
        return "it is compiled code for the recorded device"
    values = [program.values[one] for one in launch.touched()]
    own = [one for one in values if one.device_format]
    elsewhere = [
        one
        for one in launch.symbols()
        if one.kind == "device" and one.name.partition(":")[0] != program.device
    ]
    reasons = (
        (any(one.on_host for one in values), "it uses a host constant, whose memory is the host's"),
        (bool(own), f"{own[0].name} lies in a format of the device" if own else ""),
        (bool(elsewhere), f"it makes a tensor on {elsewhere[0]}" if elsewhere else ""),
        (launch.name in _PINNING, "it pins host memory"),
        (not runs_on(launch.name, device_type), f"{launch.name} has no kernel on {device_type}"),
    )
    return next((why for is_so, why in reasons if is_so), "")


def retargeted(
    bound: BoundProgram,
    device: torch.device,
    weights: Mapping[int, Sequence[torch.Tensor]],
) -> BoundProgram:
    """The Program for another device: its operators make what they make there.

    A call's surroundings are not compared with the recorded ones: the caller does that.

    Args:
        bound: launches that `why_not_on` has no word against.
        device: with an index, unless it is the CPU.
        weights: for each Value of role weight that tensors hold, copies of these on the device.
    """
    program = bound.program
    moved = dataclasses.replace(
        program,
        device=device.type,
        device_index=None if device.type == "cpu" else device.index,
        launches=tuple(_on_device(launch, device.type) for launch in program.launches),
        caller=None,
    )
    check_program(moved)
    held = {index: tuple(weights[index]) for index in bound.bindings.weights}
    return BoundProgram(moved, dataclasses.replace(bound.bindings, weights=held, root=None))


def _on_device(launch: Launch, device_type: str) -> Launch:
    """The launch with the device's type where the recorded one stood, or was meant."""
    declared = find_overload(launch.name)._schema.arguments
    is_factory = not any(True for _ in launch.views())
    arguments = [
        _argument(one.name, given, device_type, is_factory=is_factory)
        for one, given in zip(declared, launch.arguments, strict=True)
    ]
    return dataclasses.replace(launch, arguments=tuple(arguments))


def _argument(name: str, given: Argument, device_type: str, *, is_factory: bool) -> Argument:
    if isinstance(given, Symbol) and given.kind == "device":
        return Symbol("device", device_type)
    if name == "device" and given is None and is_factory:  # the default one, which is the host
        return Symbol("device", device_type)
    if name == "pin_memory" and given is True and device_type != "cpu":
        return False
    return given
