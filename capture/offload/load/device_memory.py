"""The memory that loads take on each device, and the limits of these memories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.errors import OutOfMemory
from offload.load.placed_devices import PlacedDevices
from offload.load.placed_segments import PlacedGroup
from offload.plan import Plan, SlotKind, place_values
from offload.plan.topology import Machine
from offload.program import PLACED_ROLES, Program, Role
from offload.run import Executable
from offload.run.transfers import ALIGNMENT_BYTES, Memory

_HELD = (SlotKind.INPUT, SlotKind.OUTPUT, SlotKind.DERIVED)


def held_limit(run: Executable) -> Executable:
    """Return an executable that fits the limit that the user gave its device, or close it.

    Counts weights (under a budget what they take of the device), activations as they are placed
    together, inputs and results.

    Raises:
        OutOfMemory: it takes more.
    """
    machine, plan = run.machine, run.plan
    if not machine.is_limited:
        return run
    taken = beside_weights_bytes(run.program, plan, machine)
    if plan.streaming is None:
        taken += sum(slot.size_bytes for slot in plan.of_kind(SlotKind.WEIGHT))
    else:
        taken += plan.streaming.taken_bytes
    if taken > machine.memory_bytes:
        run.close()
        raise OutOfMemory(
            f"the program takes {taken:,} of {machine.memory_bytes:,} bytes on "
            f"{run.device} (weights, activations, inputs and results): give the device more by "
            "memory_bytes=, or load with a weights_budget= or on further devices"
        )
    return run


def beside_weights_bytes(program: Program, plan: Plan, machine: Machine) -> int:
    """What a load takes beside its weights: activations as placed together, inputs and results."""
    held = sum(slot.size_bytes for slot in plan.slots if slot.kind in _HELD)
    # Also where operators allocate their results, outside the executable's own feature map.
    placed_bytes = place_values(program, machine).feature_map_bytes
    return held + max(plan.feature_map_bytes, placed_bytes)


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
    together; and Values that cross from one segment to another, wherever they lie. The caller's
    memory also holds the weights that only other devices read, and all inputs and results.
    """
    return {
        memory: _taken(program, _planned_in(groups, devices, memory), devices, memory, limit_bytes)
        for memory, limit_bytes in limits.items()
    }


class MemoryLeft:
    """The room for segments on other devices than the planned ones.

    Owner: one load.
    """

    def __init__(
        self, program: Program, groups: Sequence[PlacedGroup], devices: PlacedDevices
    ) -> None:
        """Begin with the segments on their planned devices."""
        self._program, self._devices = program, devices
        self._limits = memory_limits(devices)
        self._here = {memory: _planned_in(groups, devices, memory) for memory in self._limits}

    def take(self, group: PlacedGroup, device: int) -> bool:
        """Take the room for a segment on a device that may run it. False: there is none."""
        memory = self._devices.memories[device]
        if device == group.planned or memory not in self._limits:
            return True
        here = [*self._here[memory], group]
        limit_bytes = self._limits[memory]
        if _taken(self._program, here, self._devices, memory, limit_bytes) > limit_bytes:
            return False
        self._here[memory] = here
        return True


def _planned_in(
    groups: Sequence[PlacedGroup], devices: PlacedDevices, memory: Memory
) -> list[PlacedGroup]:
    return [one for one in groups if devices.memories[one.planned] is memory]


def _taken(
    program: Program,
    here: Sequence[PlacedGroup],
    devices: PlacedDevices,
    memory: Memory,
    limit_bytes: int,
) -> int:
    """The bytes that these segments take of a memory; exact only above the limit."""
    is_home = memory is devices.memories[devices.home]
    weights = _weights_in(program, here, is_home)
    crossing = {value for one in here for value in (*one.part.inputs, *one.part.outputs)}
    if is_home:
        crossing |= _of_caller(program)
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
    machine = devices.backends[devices.memories.index(memory)].machine(memory.device.index)
    return taken + sum(
        place_values(one.part.bound.program, machine).feature_map_bytes for one in here
    )


def _weights_in(program: Program, here: Sequence[PlacedGroup], is_home: bool) -> set[int]:
    """The weights that lie in a memory: those that segments read there, or all of the model."""
    if is_home:
        is_host = program.device == "cpu"
        return {one.index for one in program.of_role(Role.WEIGHT) if is_host or not one.on_host}
    return {
        one.part.values[value.index]
        for one in here
        for value in one.part.bound.program.of_role(Role.WEIGHT)
    }


def _of_caller(program: Program) -> set[int]:
    """The Values that the caller gives and receives."""
    seen = {view.value for view in program.inputs}
    seen |= {result.view.value for result in program.results}
    return {one for one in seen if program.values[one].role is not Role.WEIGHT}
