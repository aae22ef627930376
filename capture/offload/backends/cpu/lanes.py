"""Lanes of launches, lowered for the CPU's residents."""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set

from offload.backends.loaded import LoadedLanes
from offload.native import _native
from offload.plan import Plan, SlotKind
from offload.plan.steps import Lane, Record, Run, Wait
from offload.program import Program

NativeStep = tuple[_native.LaneStep, int, int]


def set_lanes(
    resident: _native.CpuResident, program: Program, plan: Plan, operator_allocated: Set[int]
) -> None:
    """Make executions run on the Plan's lanes of launches; a no-op without lanes."""
    if plan.launch_lanes is not None:
        endings = [
            (slot, 0, 0, launches)
            for slot, launches in _operator_slots(program, plan, operator_allocated)
        ]
        _native.set_lanes(resident, native_lanes(plan.launch_lanes), endings)


def loaded_lanes(resident: _native.CpuResident, plan: Plan) -> LoadedLanes | None:
    """Describe the lanes for a Loaded."""
    if plan.launch_lanes is None:
        return None
    return LoadedLanes(
        counts=functools.partial(_native.lane_counts, resident),
        share_always=functools.partial(_native.share_always, resident),
    )


def native_lanes(lanes: Sequence[Lane]) -> list[list[NativeStep]]:
    """Return the steps of lanes, without those implied by the execution itself.

    An execution ends when all lanes have ended, and the next begins then: so waits for the previous
    execution or at the end are dropped, and so are events that only such waits use.
    """
    kept = [[one for one in lane.steps if not _is_of_before(one)] for lane in lanes]
    for steps in kept:
        while steps and not isinstance(steps[-1], Run | Record):
            steps.pop()
    awaited = {one.event for steps in kept for one in steps if isinstance(one, Wait)}
    found: list[list[NativeStep]] = []
    for steps in kept:
        row: list[NativeStep] = []
        for one in steps:
            if isinstance(one, Run):
                row.append((_native.LaneStep.RUN, one.first, one.last))
            elif isinstance(one, Wait):
                row.append((_native.LaneStep.WAIT, one.event, 0))
            elif isinstance(one, Record) and one.event in awaited:
                row.append((_native.LaneStep.RECORD, one.event, 0))
        found.append(row)
    return found


def _is_of_before(step: object) -> bool:
    return isinstance(step, Wait) and step.age == 1


def _operator_slots(
    program: Program, plan: Plan, operator_allocated: Set[int]
) -> list[tuple[int, list[int]]]:
    """Return the slots whose memory is freed within an execution, and the launches using them."""
    launches: dict[int, list[int]] = {}
    for launch in program.launches:
        for value in {*launch.reads, *launch.writes} & operator_allocated:
            place = plan.places[value]
            if place is not None and plan.slots[place.slot].kind is SlotKind.OPERATOR:
                launches.setdefault(place.slot, []).append(launch.index)
    return sorted(launches.items())
