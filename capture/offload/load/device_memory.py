"""The memory that placed segments take on each device, and the limits of these memories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.load.placed_devices import PlacedDevices
from offload.load.placed_segments import PlacedGroup
from offload.plan import place_values
from offload.program import PLACED_ROLES, Program, Role
from offload.run.transfers import ALIGNMENT_BYTES, Memory


def memory_limits(devices: PlacedDevices) -> dict[Memory, int]:
    """The size of each memory in bytes, where its devices report it."""
    found: dict[Memory, int] = {}
    for backend, memory in zip(devices.backends, devices.memories, strict=True):
        limit_bytes = backend.machine(memory.device.index).memory_bytes
        if limit_bytes:
            found[memory] = min(limit_bytes, found.get(memory, limit_bytes))
    return found


def taken_bytes(
    program: Program,
    groups: Sequence[PlacedGroup],
    devices: PlacedDevices,
    limits: Mapping[Memory, int],
) -> dict[Memory, int]:
    """The bytes that segments take of each limited memory, with one execution in flight.

    Counts weights once for each memory; the activations of each segment, as they are placed
    together; and Values that cross from one segment to another, wherever they lie.
    """
    return {memory: _taken(program, groups, devices, memory, limits[memory]) for memory in limits}


def _taken(
    program: Program,
    groups: Sequence[PlacedGroup],
    devices: PlacedDevices,
    memory: Memory,
    limit_bytes: int,
) -> int:
    here = [one for one in groups if devices.memories[one.planned] is memory]
    weights = {
        one.part.values[value.index]
        for one in here
        for value in one.part.bound.program.of_role(Role.WEIGHT)
    }
    crossing = {value for one in here for value in (*one.part.inputs, *one.part.outputs)}
    taken = sum(program.values[value].size_bytes for value in weights)
    taken += sum(program.values[value].size_bytes + ALIGNMENT_BYTES for value in crossing)
    most = sum(
        value.size_bytes + ALIGNMENT_BYTES
        for one in here
        for value in one.part.bound.program.values
        if value.role in PLACED_ROLES
    )
    if taken + most <= limit_bytes:
        return taken + most  # it fits without regard to lifetimes
    return taken + sum(_activation_bytes(one, devices) for one in here)


def _activation_bytes(group: PlacedGroup, devices: PlacedDevices) -> int:
    memory = devices.memories[group.planned]
    machine = devices.backends[group.planned].machine(memory.device.index)
    return place_values(group.part.bound.program, machine).feature_map_bytes
