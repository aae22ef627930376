"""Checks the order of any Plan's Steps. Shares no code with any planner.

Two steps that touch the same bytes, or the same effect, one of them writing, must be ordered by a
path of lanes and events, in one execution and from one to the next; and a reader must find the
content that it expects, copied or made by the last writer. Paths are found by vector clocks (C.
Fidge, "Timestamps in Message-Passing Systems That Preserve the Partial Ordering", 1988; F. Mattern,
"Virtual Time and Global States of Distributed Systems", 1988): for each lane, how much has ended,
whatever the timing (happens-before).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from offload.errors import PlanError
from offload.plan.steps import Copy, Lane, Record, Run, Step, Wait, prologue

_N_EXECUTIONS = 3
"""Each waits at most for the one before, so the third is like all that follow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Touch:
    """Bytes of a memory that something reads or writes, or an effect.

    Attributes:
        memory: the name of the memory; for an effect, the effect itself, as a single byte.
        begin, end: the bytes, end exclusive.
        content: the content that is read or written; None where it is unknown, as for an effect.
        is_write: it is written; otherwise it is read, and must have been written.
    """

    memory: Hashable
    begin: int
    end: int
    content: Hashable
    is_write: bool


class Touches(Protocol):
    """The accesses of steps, in the order in which they happen."""

    def at_first(self) -> Iterator[Touch]:
        """The contents of memories before anything runs, as writes."""

    def of_launch(self, launch: int, execution: int) -> Iterator[Touch]:
        """The accesses of a launch in an execution."""

    def of_copy(self, copy: Copy, execution: int) -> Iterator[Touch]:
        """The accesses of a copy in an execution; execution -1 is the prologue."""

    def launch_name(self, launch: int) -> str:
        """The name of a launch, for messages."""

    def copy_name(self, copy: Copy) -> str:
        """The name of a copy, for messages."""


def check_steps(lanes: Sequence[Lane], n_launches: int, touches: Touches) -> None:
    """Prove that nothing is read or overwritten too early, whatever the lanes' timing.

    Raises:
        PlanError: lanes wait for one another, or for an event that never comes; an event is
            recorded twice; launches are left out, or run twice; two steps that must not run
            concurrently are not ordered, or a step finds other bytes than it reads. The message
            names them.
    """
    _check_launches(lanes, n_launches)
    walk = _Walk(lanes, touches)
    walk.carry_out(-1, [prologue(lane) for lane in lanes])
    for execution in range(_N_EXECUTIONS):
        walk.carry_out(execution, [lane.steps for lane in lanes])


def _check_launches(lanes: Sequence[Lane], n_launches: int) -> None:
    """Check that all launches run once, and in order on their lane."""
    found: list[int] = []
    for lane in lanes:
        runs = [one for one in lane.steps if isinstance(one, Run)]
        for one, other in itertools.pairwise(runs):
            if other.first < one.last:
                raise PlanError(f"launches {other.first} and {one.last - 1} are in the wrong order")
        found += [launch for one in runs for launch in range(one.first, one.last)]
    if sorted(found) != list(range(n_launches)):
        raise PlanError(f"expected each of {n_launches} launches once in the steps of an execution")


@dataclasses.dataclass(frozen=True, slots=True)
class _Actor:
    """A launch or copy: its position in its lane, over all executions."""

    lane: int
    number: int
    name: str


@dataclasses.dataclass(slots=True)
class _Range:
    """Bytes [begin, end) with one content, its writer, and by lane the last reader since."""

    begin: int
    end: int
    content: Hashable
    writer: _Actor | None
    readers: dict[int, _Actor]

    def part(self, begin: int, end: int) -> _Range:
        return _Range(begin, end, self.content, self.writer, dict(self.readers))


class _Memory:
    """The known bytes of one memory: ranges in order, disjoint."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []

    def within(self, begin: int, end: int) -> tuple[slice, list[_Range]]:
        """The ranges within [begin, end); ranges that extend beyond it are split first."""
        for at in (begin, end):
            self._cut(at)
        first, last = (
            bisect.bisect_left(self._ranges, at, key=lambda one: one.begin) for at in (begin, end)
        )
        return slice(first, last), self._ranges[first:last]

    def replace(self, place: slice, new: _Range) -> None:
        self._ranges[place] = [new]

    def _cut(self, at: int) -> None:
        index = bisect.bisect_right(self._ranges, at, key=lambda one: one.end)
        if index < len(self._ranges) and self._ranges[index].begin < at:
            one = self._ranges[index]
            self._ranges[index : index + 1] = [one.part(one.begin, at), one.part(at, one.end)]


class _Walk:
    """Executions, one after another, in some order that the steps allow."""

    def __init__(self, lanes: Sequence[Lane], touches: Touches) -> None:
        self._lanes = lanes
        self._touches = touches
        self._memories: dict[Hashable, _Memory] = {}
        self._clocks = [[0] * len(lanes) for _ in lanes]  # by lane, what has ended of each lane
        self._recorded: dict[tuple[int, int], list[int]] = {}  # by event and execution
        self._events = {
            one.event for lane in lanes for one in lane.steps if isinstance(one, Record)
        }
        for one in touches.at_first():
            if one.begin < one.end:
                self._place(one)

    def carry_out(self, execution: int, steps: Sequence[Sequence[Step]]) -> None:
        at = [0] * len(steps)
        while any(position < len(of) for position, of in zip(at, steps, strict=True)):
            before = list(at)
            for lane, of in enumerate(steps):
                while at[lane] < len(of) and self._step(lane, of[at[lane]], execution):
                    at[lane] += 1
            if at == before:
                stuck = [
                    f"the lane of {self._lanes[lane].kind} at step {at[lane]} ({of[at[lane]]})"
                    for lane, of in enumerate(steps)
                    if at[lane] < len(of)
                ]
                raise PlanError(f"lanes wait for one another: {' and '.join(stuck)}")

    def _step(self, lane: int, step: Step, execution: int) -> bool:
        """Carry out a step; False: it waits for an event that has not come yet."""
        clock = self._clocks[lane]
        if isinstance(step, Record):
            if (step.event, execution) in self._recorded:
                raise PlanError(f"event {step.event} is recorded twice in an execution")
            self._recorded[step.event, execution] = list(clock)
        elif isinstance(step, Wait):
            return self._wait(step, clock, execution)
        elif isinstance(step, Copy):
            touched = self._touches.of_copy(step, execution)
            self._act(lane, self._touches.copy_name(step), touched)
        else:
            for launch in range(step.first, step.last):
                touched = self._touches.of_launch(launch, execution)
                self._act(lane, self._touches.launch_name(launch), touched)
        return True

    def _wait(self, step: Wait, clock: list[int], execution: int) -> bool:
        if step.event not in self._events or step.age not in (0, 1):
            raise PlanError(
                f"expected a wait for an event of this execution or the one before, got {step}"
            )
        found = self._recorded.get((step.event, execution - step.age))
        if found is None:
            return step.age == 1 and execution <= 0  # before the first execution nothing runs
        clock[:] = map(max, clock, found)
        return True

    def _act(self, lane: int, name: str, touched: Iterator[Touch]) -> None:
        clock = self._clocks[lane]
        actor = _Actor(lane, clock[lane], name)
        for one in touched:
            if one.begin >= one.end:
                continue
            if one.is_write:
                self._write(one, actor, clock)
            else:
                self._read(one, actor, clock)
        clock[lane] += 1

    def _read(self, touch: Touch, actor: _Actor, clock: Sequence[int]) -> None:
        _, found = self._memory(touch).within(touch.begin, touch.end)
        at = touch.begin
        for one in found:
            if one.begin != at or one.content != touch.content:
                break
            if not _has_ended(one.writer, clock):
                raise PlanError(_race(actor, "reads", touch, one.writer, "writes"))
            one.readers[actor.lane] = actor
            at = one.end
        if at < touch.end:
            there = next((one.writer for one in found if one.end > at), None)
            raise PlanError(
                f"{actor.name} would not find what it reads at bytes {at} to {touch.end} of "
                f"{touch.memory}" + (f", which {there.name} overwrites" if there else "")
            )

    def _write(self, touch: Touch, actor: _Actor, clock: Sequence[int]) -> None:
        memory = self._memory(touch)
        place, found = memory.within(touch.begin, touch.end)
        for one in found:
            users = [(one.writer, "writes"), *((each, "reads") for each in one.readers.values())]
            for other, does in users:
                in_place = other is actor and one.content == touch.content
                if not in_place and not _has_ended(other, clock):
                    raise PlanError(_race(actor, "writes", touch, other, does))
        memory.replace(place, _Range(touch.begin, touch.end, touch.content, actor, {}))

    def _place(self, touch: Touch) -> None:
        """Place the content of a memory before anything runs."""
        memory = self._memory(touch)
        place, found = memory.within(touch.begin, touch.end)
        if found:
            raise PlanError(
                f"two things lie at bytes {found[0].begin} to {found[0].end} of {touch.memory}"
            )
        memory.replace(place, _Range(touch.begin, touch.end, touch.content, None, {}))

    def _memory(self, touch: Touch) -> _Memory:
        return self._memories.setdefault(touch.memory, _Memory())


def _has_ended(actor: _Actor | None, clock: Sequence[int]) -> bool:
    """Whether an actor has ended, whatever the timing, given how much of each lane has."""
    return actor is None or actor.number < clock[actor.lane]


def _race(actor: _Actor, does: str, touch: Touch, other: _Actor | None, other_does: str) -> str:
    assert other is not None  # the initial content has ended
    what = str(touch.memory)
    if isinstance(touch.memory, str):
        what = f"bytes {touch.begin} to {touch.end} of {what}"
    return (
        f"{actor.name} {does} {what}, which {other.name} {other_does}, and nothing orders the two"
    )
