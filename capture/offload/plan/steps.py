"""Steps: what an execution consists of, lane by lane, and what waits for what.

A lane carries out its steps in order, one at a time, and those of an execution after those of the
one before. Nothing else orders two lanes but events: who waits for one goes on when all has ended
that its lane was given before the record. So an order of work means the same on every device, and
each is told it in its own words: as counters of threads, edges of a graph, or events of streams.

What an execution needs may be brought by the one before (`Copy.ahead`, `Wait.age`). Before the
first one it is brought by itself (`prologue`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

from offload.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Launches in a row, from `first` up to and without `last`."""

    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A piece of a weight is copied from its store to its place, or a collective is exchanged.

    Attributes:
        piece: its index in `Streaming.pieces`; on a lane of collectives the index of the launch
            that starts the collective.
        ahead: 0: for the launches of this execution; 1: for those of the next one, whose first
            has it copied beforehand.
    """

    piece: int
    ahead: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """An event: all that the lane was given before has ended. Recorded once in an execution."""

    event: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """The lane goes on once an event has come.

    Attributes:
        event: of another lane.
        age: 0: as this execution records it; 1: as the one before did.
    """

    event: int
    age: int = 0


Step = Run | Copy | Record | Wait


class LaneKind(enum.StrEnum):
    """What a lane carries out."""

    LAUNCHES = "launches"
    COPIES = "copies"
    COLLECTIVES = "collectives"  # what a process group exchanges


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """The steps of one lane in one execution, in order."""

    kind: LaneKind
    steps: tuple[Step, ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What it copies, in order."""
        return tuple(one for one in self.steps if isinstance(one, Copy))


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One copy of a streamed piece as two lanes count it: the other lane's launches.

    Attributes:
        piece: its index in `Streaming.pieces`.
        first_launch: of the pass, that waits for it, if none before does.
        after_launch: it may begin when this launch has ended.
        after_pass: 0: that launch of the same pass; -1: of the pass before.
    """

    piece: int
    first_launch: int
    after_launch: int
    after_pass: int


def n_copied_ahead(lanes: Sequence[Lane]) -> int:
    """How many copies are for the next execution: a lane's last, and the first that it needs."""
    return sum(one.ahead for lane in lanes for one in lane.copies)


def launch_lane(n_launches: int) -> Lane:
    """The lane of a Plan that copies nothing: its launches, one after the other."""
    return Lane(LaneKind.LAUNCHES, (Run(0, n_launches),) if n_launches else ())


def lanes_of_launches(lanes: Sequence[Lane]) -> dict[int, int]:
    """By launch the lane that runs it."""
    return {
        launch: index
        for index, lane in enumerate(lanes)
        for one in lane.steps
        if isinstance(one, Run)
        for launch in range(one.first, one.last)
    }


def prologue(lane: Lane) -> tuple[Step, ...]:
    """What a lane does before the first execution: copies for it, and events behind them."""
    found: list[Step] = []
    is_ahead = False
    for step in lane.steps:
        if isinstance(step, Copy):
            is_ahead = step.ahead == 1
        if is_ahead and isinstance(step, (Copy, Record)):
            found.append(step)
    return tuple(found)


def streaming_lanes(n_launches: int, transfers: Sequence[Transfer]) -> tuple[Lane, ...]:
    """The steps of launches in a row and of transfers in a row beside them.

    Transfers that wait for the execution before alone, which the first ones do, come at the end of
    that one; so a lane never waits for what is older than the execution that it is in, but for
    what was copied ahead. Waits that others imply are left out.
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
    """Launches in a row, and what stands between them."""

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
    """By launch the transfer that it waits for; none where an earlier launch waits for as much."""
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
    """By transfer the launch that it waits for in its execution; none where one before it does."""
    found: dict[int, int] = {}
    latest = -1
    for index in order:
        one = transfers[index]
        if (index < n_ahead or one.after_pass == 0) and one.after_launch > latest:
            latest = found[index] = one.after_launch
    return found


def n_ahead_of(transfers: Sequence[Transfer]) -> int:
    """How many of the first transfers wait for the execution before alone."""
    return next((at for at, one in enumerate(transfers) if one.after_pass == 0), len(transfers))


@functools.lru_cache(maxsize=64)
def counted(lanes: tuple[Lane, ...]) -> tuple[Transfer, ...]:
    """The transfers of a pass, for who counts launches and copies instead of telling events.

    In the order in which they are needed: those that the execution before makes come first.

    Raises:
        PlanError: a copy waits for no launch, which no count tells.
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
    # In the next execution the first arrival comes behind the last copies.
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
    """By event the launch that has ended then, and the first launch that waits for it."""
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
