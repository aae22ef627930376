"""Segments of a placed Program on their devices: cut, moved to each device's memory, and loaded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from offload.backends import Backend
from offload.errors import BackendUnavailable, CaptureError
from offload.interpreter.retarget import retargeted
from offload.load.placed_devices import PlacedDevices
from offload.plan.program_tasks import ProgramTasks
from offload.plan.task_placement import TaskPlacement
from offload.program import BoundProgram
from offload.program.slice import Slice, slice_program
from offload.run import Executable
from offload.run.device_choice import Placement, SegmentCosts
from offload.run.placed_queue import PlacedSegment
from offload.run.transfers import Memory
from offload.run.weight_copies import WeightCopies

LoadSegment = Callable[[BoundProgram, Backend], Executable]
"""Loads a Program on a device as a load on that device alone does."""

# Where segments may be moved, each takes at most this part of all, but at least several hand-overs.
_N_PARTS = 8
_LEAST_HAND_OVERS = 4


class CannotRun(CaptureError):
    """A device with separate memory cannot run a segment that was placed on it.

    Attributes:
        device: that device.
        launches: those of the segment.
    """

    def __init__(self, message: str, device: int, launches: Sequence[int]) -> None:
        super().__init__(message)
        self.device, self.launches = device, tuple(launches)


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedGroup:
    """Tasks that are executed together.

    Attributes:
        tasks: of the placement.
        launches: of the tasks, ascending.
        planned: the device in the placement.
        part: the launches as a separate Program for the recorded device.
    """

    tasks: tuple[int, ...]
    launches: tuple[int, ...]
    planned: int
    part: Slice


def part_on(devices: PlacedDevices, copies: WeightCopies, part: Slice, device: int) -> BoundProgram:
    """The Program that a device executes of a slice, retargeted if its memory is separate.

    Raises:
        OutOfMemory: the device has no room for its weights.
    """
    if devices.shares(device):
        return part.bound
    memory = devices.memories[device]
    weights = {at: part.values[at] for at in part.bound.bindings.weights}
    held = copies.on(memory, weights.values())
    found = {at: held[value] for at, value in weights.items()}
    return retargeted(part.bound, memory.device, found)


def grouped(
    bound: BoundProgram,
    devices: PlacedDevices,
    tasks: ProgramTasks,
    placement: TaskPlacement,
    *,
    kind: Placement,
    hand_over_ns: float,
) -> list[PlacedGroup]:
    """Segments as planned, cut into parts where these may be moved."""
    groups = [
        tuple(task for task in group if tasks.launches[task])
        for group in _groups(placement, kind, hand_over_ns)
    ]
    groups = [group for group in groups if group]
    if kind is Placement.STATIC and devices.has_others:
        groups = _merged(groups, devices, placement)
    found = []
    for group in groups:
        launches = sorted(index for task in group for index in tasks.launches[task])
        planned = placement.processors[group[0]]
        stays = kind is Placement.STATIC and devices.shares(planned)
        is_whole = len(groups) == 1 and (stays or not devices.has_others)
        part = _whole(bound) if is_whole else slice_program(bound, launches)
        found.append(PlacedGroup(tuple(group), tuple(launches), planned, part))
    return found


def _groups(
    placement: TaskPlacement, kind: Placement, hand_over_ns: float
) -> list[tuple[int, ...]]:
    segments = placement.segments()
    if kind is Placement.STATIC:
        return [one.tasks for one in segments]
    total_ns = sum(placement.end_ns) - sum(placement.begin_ns)
    most_ns = max(total_ns / _N_PARTS, _LEAST_HAND_OVERS * hand_over_ns)
    groups: list[tuple[int, ...]] = []
    for one in segments:
        taken_ns = 0
        part: list[int] = []
        for task in one.tasks:
            if part and taken_ns >= most_ns:
                groups.append(tuple(part))
                part, taken_ns = [], 0
            part.append(task)
            taken_ns += placement.end_ns[task] - placement.begin_ns[task]
        groups.append(tuple(part))
    return groups


def _merged(
    groups: Sequence[tuple[int, ...]], devices: PlacedDevices, placement: TaskPlacement
) -> list[tuple[int, ...]]:
    """Merge consecutive segments where that saves transfers more time than they then wait.

    Segments end where data are sent, so that they are sent early. If the next segment on the same
    device waits for nothing else, sends to the same memories, and takes no longer than the overhead
    of a transfer, sending its data together is better.
    """
    graph, at = placement.graph, placement.processors
    found: list[tuple[int, ...]] = []
    last_on: dict[int, int] = {}
    for group in groups:
        device = at[group[0]]
        before = last_on.get(device)
        if before is not None and _is_merged(found[before], group, devices, placement):
            found[before] += group
            continue
        last_on[device] = len(found)
        found.append(group)
    assert sum(map(len, found)) == sum(map(len, groups)) <= len(graph.tasks)
    return found


def _is_merged(
    first: tuple[int, ...],
    second: tuple[int, ...],
    devices: PlacedDevices,
    placement: TaskPlacement,
) -> bool:
    graph, at = placement.graph, placement.processors
    device = at[first[0]]

    def sent_to(group: tuple[int, ...]) -> set[int]:
        found = {at[one.consumer] for one in graph.edges if one.producer in group}
        return {one for one in found if devices.memories[one] is not devices.memories[device]}

    waits = {
        one.producer for one in graph.edges if one.consumer in second and at[one.producer] != device
    }
    known = {one.producer for one in graph.edges if one.consumer in first}
    targets = sent_to(second)
    if not waits <= known or not targets or not targets <= sent_to(first):
        return False
    saved_ns = min(graph.links[device, one].overhead_ns for one in targets)
    return sum(graph.cost_ns(task, device) for task in second) <= saved_ns


def _whole(bound: BoundProgram) -> Slice:
    """The slice of all launches, called as the Program is."""
    inputs = tuple(view.value for view in bound.program.inputs)
    return Slice(bound, inputs, (), tuple(range(len(bound.program.values))))


def load_segments(
    groups: Sequence[PlacedGroup],
    devices: PlacedDevices,
    tasks: ProgramTasks,
    *,
    kind: Placement,
    copies: WeightCopies,
    load: LoadSegment,
    has_room: Callable[[PlacedGroup, int], bool] = lambda *_: True,
) -> list[PlacedSegment]:
    """Load each segment on its device, and on the others where it may be moved there.

    If a load fails, loaded segments are closed. `has_room` says whether a device has the memory for
    a segment that may be moved there; where it has not, the segment is not loaded.

    Raises:
        CannotRun: a device with separate memory cannot run a segment that was placed on it.
    """
    group_of = {task: at for at, group in enumerate(groups) for task in group.tasks}
    segments: list[PlacedSegment] = []
    with contextlib.ExitStack() as loaded:
        for at, group in enumerate(groups):
            before = {
                group_of[edge.producer]
                for edge in tasks.graph.edges
                if group_of.get(edge.consumer) == at and edge.producer in group_of
            }
            runs: list[Executable | None] = []
            costs: list[float | None] = []
            for device in range(len(devices.backends)):
                cost = _sum(tasks.graph.tasks[task].costs_ns[device] for task in group.tasks)
                is_wanted = device == group.planned or kind is not Placement.STATIC
                run = None
                if is_wanted and cost is not None and has_room(group, device):
                    run = _loaded(group, device, devices, copies, load)
                if run is not None:
                    loaded.callback(run.close)
                runs.append(run)
                costs.append(cost if run is not None else None)
            after = tuple(sorted(before - {at}))
            part = group.part
            found = SegmentCosts(tuple(costs), after, group.planned, part.inputs, part.outputs)
            segments.append(PlacedSegment(group.part, tuple(runs), found))
        loaded.pop_all()
    return segments


def _loaded(
    group: PlacedGroup,
    device: int,
    devices: PlacedDevices,
    copies: WeightCopies,
    load: LoadSegment,
) -> Executable | None:
    """Load a segment on a device; None: it cannot run there, and was not placed there."""
    bound = part_on(devices, copies, group.part, device)
    try:
        return load(bound, devices.backends[device])
    except (CaptureError, BackendUnavailable) as error:
        if devices.shares(device):
            raise
        if device != group.planned:
            return None
        name = devices.names[device]
        raise CannotRun(f"{name} cannot run a segment: {error}", device, group.launches) from error


def copies_used(
    segments: Sequence[PlacedSegment], devices: PlacedDevices
) -> set[tuple[int, Memory]]:
    """The weights that segments read in separate memories of devices."""
    return {
        (one.slice.values[at], devices.memories[device])
        for one in segments
        for device, run in enumerate(one.runs)
        if run is not None and not devices.shares(device)
        for at in one.slice.bound.bindings.weights
    }


def _sum(costs: Iterable[int | None]) -> float | None:
    found = list(costs)
    return None if None in found else float(sum(one for one in found if one is not None))
