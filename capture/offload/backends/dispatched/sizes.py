"""Programs whose sizes vary, dispatched: one resident, and size constants in two parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from offload.backends.cpu.builder import plan_apart
from offload.backends.cpu.resizing import host_constants
from offload.backends.dispatched.builder import DispatchedBuilder
from offload.backends.dispatched.host_part import split_constants, whole_on_host
from offload.backends.loaded import Loaded, Prepared
from offload.interpreter.settled_family import SettledFamily, SizeConstants
from offload.native import _native
from offload.plan import Plan, check_plan
from offload.program import Bindings, BoundProgram, Program
from offload.program.varying_numbers import values_bytes


class DispatchedSizes:
    """Loads Programs whose sizes vary; see `SizeChanger`."""

    one_host_core = (
        "launches are torch's operators, each of which infers shapes, tiles, allocates and "
        "launches in one call, which offload cannot divide"
    )

    def on_host_cores(self, n_cores: int) -> DispatchedSizes:
        """Return itself: sizes change on the calling thread."""
        return self

    def __init__(self, device_of: Callable[[Program], torch.device]) -> None:
        """Take the function that returns a Program's executing device."""
        self._device_of = device_of

    def instantiate(self, settled: SettledFamily, prepared: Prepared, plan: Plan) -> Loaded:
        """As `Backend.instantiate`, for a Family."""
        check_plan(prepared.program, plan)
        builder = DispatchedBuilder(
            prepared.bound,
            plan,
            prepared.operator_allocated,
            settled.constant_values,
            self._device_of(prepared.program),
        )
        return builder.loaded()

    def constants(self, settled: SettledFamily) -> _native.SizeConstants | None:
        """Return what computes size constants; None without size constants.

        For a device the host computes integers and booleans, whose bits are the same there, and
        transfers them in one copy; operators of the device compute the rest.
        """
        if settled.constants is None:
            return None
        bindings, device = settled.bound.bindings, self._device_of(settled.program)
        if device.type == "cpu":
            return _device_constants(settled.constants, (), None, bindings, device)
        split = split_constants(settled.constants)
        if split is None:
            return _device_constants(settled.constants, (), None, bindings, device)
        on_host = host_constants(split.on_host, bindings)
        return _device_constants(split.on_device, split.copied, on_host, bindings, device)


def constants_of_host(
    constants: SizeConstants, bindings: Bindings, device: torch.device
) -> _native.SizeConstants:
    """Return what computes size constants by torch on the host, and transfers them to a device.

    Raises:
        CaptureError, OutOfMemory: as `Backend.instantiate`.
    """
    split = whole_on_host(constants)
    on_host = host_constants(split.on_host, bindings)
    if device.type == "cpu":
        return on_host
    return _device_constants(split.on_device, split.copied, on_host, bindings, device)


def _device_constants(
    constants: SizeConstants,
    copied: tuple[int, ...],
    on_host: _native.SizeConstants | None,
    bindings: Bindings,
    device: torch.device,
) -> _native.SizeConstants:
    """Return launches on the device. `copied`: their Values that the host has computed."""
    program, given = constants.program, constants.weights.keys()
    plan = plan_apart(program, {*given, *copied}, {*constants.results})
    made = frozenset(range(len(program.values))) - given - {*copied}
    bound = BoundProgram(program, dataclasses.replace(bindings, weights={}))
    return _native.SizeConstants(
        resident=DispatchedBuilder(bound, plan, made, copied, device).dispatched(),
        values=values_bytes(program),
        results=[(one, one) for one in constants.results],
        given=sorted(constants.weights.items()),
        on_host=on_host,
        device=str(device),
    )
