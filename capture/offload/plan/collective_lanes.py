"""Collectives as Steps: launches on one lane, and a lane of exchanges for each process group.

A group performs its collectives in the order of their starts, while launches continue. So a group
is a lane: its `Copy` waits for the launch that starts the collective, and the launch that waits for
the collective waits for that `Copy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.plan.simulate_steps import SimulatedExecution, simulate_steps
from offload.plan.steps import Copy, Lane, LaneKind, Record, Run, Step, Wait
from offload.program import Program
from offload.program.collectives import group_name


@dataclasses.dataclass(frozen=True, slots=True)
class StartedCollective:
    """A collective of a Program.

    Attributes:
        start: the launch that starts it.
        waits: the launches that wait for it, in order, for each of its results.
        group: the name of its process group.
    """

    start: int
    waits: tuple[int, ...]
    group: str


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Durations of the launches of a Program and of its collectives, in ns.

    Attributes:
        launch_ns: of each launch alone; a launch that waits counts without its blocked time.
        transfer_ns: for each launch that starts a collective, the group's time for it once its turn
            has come; 0 for other launches.
    """

    launch_ns: tuple[float, ...]
    transfer_ns: tuple[float, ...]


def started_collectives(program: Program) -> tuple[StartedCollective, ...]:
    """The collectives of a Program, in the order in which they are started."""
    waits: dict[int, list[int]] = {}  # by the launch that starts it
    started: dict[int, int] = {}  # by an awaited Value
    for launch in program.launches:
        if launch.waits:
            (view,) = launch.views()
            waits[started.pop(view.value)].append(launch.index)
        elif launch.is_collective:
            waits[launch.index] = []
            started.update(dict.fromkeys(launch.writes, launch.index))
    return tuple(
        StartedCollective(start, tuple(found), group_name(program.launches[start].arguments))
        for start, found in waits.items()
    )


def collective_lanes(program: Program) -> tuple[Lane, ...]:
    """The Steps of a Program with collectives: its launches in order, and a lane for each group.

    Events 2i and 2i + 1 are the start and the end of collective i.
    """
    collectives = started_collectives(program)
    begun = {one.start: 2 * at for at, one in enumerate(collectives)}
    awaited = {one.waits[0]: 2 * at + 1 for at, one in enumerate(collectives) if one.waits}
    launches: list[Step] = []
    first = 0
    for index in range(len(program.launches)):
        if index in awaited:
            launches += [*_run(first, index), Wait(awaited[index])]
            first = index
        if index in begun:
            launches += [Run(first, index + 1), Record(begun[index])]
            first = index + 1
    launches += _run(first, len(program.launches))
    transfers: dict[str, list[Step]] = {}
    for at, one in enumerate(collectives):
        steps: list[Step] = [Wait(2 * at), Copy(one.start)]
        if one.waits:
            steps.append(Record(2 * at + 1))
        transfers.setdefault(one.group, []).extend(steps)
    groups = (Lane(LaneKind.COLLECTIVES, tuple(transfers[name])) for name in sorted(transfers))
    return (Lane(LaneKind.LAUNCHES, tuple(launches)), *groups)


def simulate_collectives(program: Program, times: CollectiveTimes) -> SimulatedExecution:
    """Simulate the Steps of a Program with collectives.

    Raises:
        PlanError: the durations are not of this Program's launches.
    """
    return simulate_steps(collective_lanes(program), times.launch_ns, times.transfer_ns)


def exchanged_spans(
    program: Program, begin_ns: Sequence[int], end_ns: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """The longest possible span of each collective, from its launches in one execution.

    A group performs one collective at a time. So a collective begins once it is started and the
    previous one has ended, and ends with the launch that waits for it, or earlier if that did not
    block.

    Args:
        program: the Program of the launches.
        begin_ns: of each launch.
        end_ns: likewise.

    Returns:
        Begin and end of each collective, by the launch that starts it.
    """
    found: dict[int, tuple[int, int]] = {}
    free_ns: dict[str, int] = {}
    for one in started_collectives(program):
        begin = max(end_ns[one.start], free_ns.get(one.group, 0))
        ended = end_ns[one.waits[0]] if one.waits else begin
        found[one.start] = (begin, max(begin, ended))
        free_ns[one.group] = found[one.start][1]
    return found


def _run(first: int, last: int) -> list[Step]:
    return [Run(first, last)] if first < last else []
