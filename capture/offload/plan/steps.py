"""Steps: the actions of an execution, lane by lane, and the waits between lanes.

A lane carries out its steps in order, one at a time, and those of an execution after those of the
previous one. Only events order two lanes: a wait ends when all work that the event's lane was given
before the record has ended. So an order of work means the same on every device, and each expresses
it in its own terms: counters of threads, edges of a graph, or events of streams.

Data that an execution needs may be copied by the previous one (`Copy.ahead`, `Wait.age`), and
before the first one by a `prologue`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

from offload.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive launches from `first` to `last`, exclusive."""

    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Copy a piece of a weight from its store to its place, or exchange a collective.

    Attributes:
        piece: its index in `Streaming.pieces`; on a lane of collectives, the index of the launch
            that starts the collective.
        ahead: 0: for the launches of this execution; 1: for those of the next; the first
            execution's is copied beforehand.
    """

    piece: int
    ahead: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Record an event: all earlier work of the lane has ended. Once in an execution."""

    event: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Continue the lane once an event has come.

    Attributes:
        event: an event of another lane.
        age: 0: as recorded by this execution; 1: by the previous one.
    """

    event: int
    age: int = 0


Step = Run | Copy | Record | Wait


class LaneKind(enum.StrEnum):
    """The work of a lane."""

    LAUNCHES = "launches"
    COPIES = "copies"
    COLLECTIVES = "collectives"  # exchanges of a process group


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """The steps of one lane in one execution, in order."""

    kind: LaneKind
    steps: tuple[Step, ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Its copies, in order."""
        return tuple(one for one in self.steps if isinstance(one, Copy))


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One copy of a streamed piece, ordered by counts of the other lane's launches.

    Attributes:
        piece: its index in `Streaming.pieces`.
        first_launch: the launch of the pass that waits for it, if no earlier launch does.
        after_launch: it may begin when this launch has ended.
        after_pass: 0: that launch of the same pass; -1: of the previous pass.
    """

    piece: int
    first_launch: int
    after_launch: int
    after_pass: int


def n_copied_ahead(lanes: Sequence[Lane]) -> int:
    """The number of copies for the next execution: the last of a lane, which it needs first."""
    return sum(one.ahead for lane in lanes for one in lane.copies)


def launch_lane(n_launches: int) -> Lane:
    """The lane of a Plan without copies: its launches, one after another."""
    return Lane(LaneKind.LAUNCHES, (Run(0, n_launches),) if n_launches else ())


def lanes_of_launches(lanes: Sequence[Lane]) -> dict[int, int]:
    """The lane of each launch."""
    return {
        launch: index
        for index, lane in enumerate(lanes)
        for one in lane.steps
        if isinstance(one, Run)
        for launch in range(one.first, one.last)
    }


def prologue(lane: Lane) -> tuple[Step, ...]:
    """The steps of a lane before the first execution: copies for it, and events behind them."""
    found: list[Step] = []
    is_ahead = False
    for step in lane.steps:
        if isinstance(step, Copy):
            is_ahead = step.ahead == 1
        if is_ahead and isinstance(step, (Copy, Record)):
            found.append(step)
    return tuple(found)


def streaming_lanes(n_launches: int, transfers: Sequence[Transfer]) -> tuple[Lane, ...]:
    """The steps of consecutive launches, and beside them of consecutive transfers.

    The first transfers, which wait only for the previous execution, come at its end; so a lane
    waits for nothing older than its execution, except for copies made ahead. Implied waits are left
    out.
    """
    if not transfers:
        return (launch_lane(n_launches),)
    n_ahead = n_ahead_of(transfers)
    awaited = _awaited(n_launches, transfers)
    order = [*range(n_ahead, len(transfers)), *range(n_ahead)]
    after = _after_launches(order, transfers, n_ahead)
    ended = {launch: event for event, launch in enumerate(sorted(set(after.values())))}
    events = range(len(ended), len(ended) + len(awaited))
    arrived = dict(zip(awaited.values(), events, strict=True))
    launches = _Runs()
    for launch in range(n_launches):
        if launch in awaited:
            index = awaited[launch]
            launches.add(Wait(arrived[index], age=int(index < n_ahead)), launch)
        if launch in ended:
            launches.add(Record(ended[launch]), launch + 1)
    launches.run_until(n_launches)
    copies: list[Step] = []
    for index in order:
        if index in after:
            copies.append(Wait(ended[after[index]]))
        copies.append(Copy(transfers[index].piece, ahead=int(index < n_ahead)))
        if index in arrived:
            copies.append(Record(arrived[index]))
    return (
        Lane(LaneKind.LAUNCHES, tuple(launches.steps)),
        Lane(LaneKind.COPIES, tuple(copies)),
    )


class _Runs:
    """Consecutive launches, and the steps between them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._begin = 0

    def run_until(self, launch: int) -> None:
        if launch > self._begin:
            self.steps.append(Run(self._begin, launch))
        self._begin = launch

    def add(self, step: Step, launch: int) -> None:
        self.run_until(launch)
        self.steps.append(step)


def _awaited(n_launches: int, transfers: Sequence[Transfer]) -> dict[int, int]:
    """By launch, the transfer that it waits for, unless an earlier launch waits for as much."""
    last_of = {one.first_launch: index for index, one in enumerate(transfers)}
    found: dict[int, int] = {}
    latest = -1
    for launch in range(n_launches):
        if last_of.get(launch, -1) > latest:
            latest = found[launch] = last_of[launch]
    return found


def _after_launches(
    order: Sequence[int], transfers: Sequence[Transfer], n_ahead: int
) -> dict[int, int]:
    """By transfer, the launch of its execution that it waits for, unless an earlier one does."""
    found: dict[int, int] = {}
    latest = -1
    for index in order:
        one = transfers[index]
        if (index < n_ahead or one.after_pass == 0) and one.after_launch > latest:
            latest = found[index] = one.after_launch
    return found


def n_ahead_of(transfers: Sequence[Transfer]) -> int:
    """The number of first transfers that wait only for the previous execution."""
    return next((at for at, one in enumerate(transfers) if one.after_pass == 0), len(transfers))


@functools.lru_cache(maxsize=64)
def counted(lanes: tuple[Lane, ...]) -> tuple[Transfer, ...]:
    """The transfers of a pass, for callers that count launches and copies instead of events.

    In the order of need: those that the previous execution makes come first.

    Raises:
        PlanError: a copy waits for no launch, which no count expresses.
    """
    if len(lanes) == 1:
        return ()
    launches, copies = lanes
    ended, waits = _counted_launches(launches)
    arrivals = [one for one in copies.steps if isinstance(one, Record) and one.event in waits]
    followed = [ended[one.event] for one in copies.steps if isinstance(one, Wait)]
    if not (arrivals and followed):
        raise PlanError("expected copies that wait for launches, and launches that wait for them")
    found: list[Transfer] = []
    after, after_pass = max(followed), -1
    pending: list[tuple[Copy, int, int]] = []
    # In the next execution the first arrival comes after the last copies.
    for step in (*copies.steps, arrivals[0]):
        if isinstance(step, Wait):
            after, after_pass = max(ended[step.event], after if after_pass == 0 else -1), 0
        elif isinstance(step, Copy):
            pending.append((step, after, after_pass - step.ahead))
        elif step in arrivals:
            found += [Transfer(one.piece, waits[step.event], *at) for one, *at in pending]
            pending = []
    n_behind = len(copies.copies) - n_copied_ahead(lanes)
    return (*found[n_behind:], *found[:n_behind])


def _counted_launches(lane: Lane) -> tuple[dict[int, int], dict[int, int]]:
    """By event, the launch that has ended then, and the first launch that waits for it."""
    ended: dict[int, int] = {}
    waits: dict[int, int] = {}
    n_run = 0
    for step in lane.steps:
        if isinstance(step, Run):
            n_run = step.last
        elif isinstance(step, Record):
            ended[step.event] = n_run - 1
        elif isinstance(step, Wait):
            waits.setdefault(step.event, n_run)
    return ended, waits
