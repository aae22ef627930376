"""Transfers between the memories of devices in an execution of placed segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from offload.errors import PlanError

INPUTS = -1
"""The producer of the caller's inputs: it ends before any segment begins."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedSegmentValues:
    """The Values that a segment reads and gives, and its memory.

    Attributes:
        memory: the number of the memory in which it runs.
        inputs: the Values of the whole Program that it takes, each once.
        outputs: the Values that it makes and that others read or the caller sees.
    """

    memory: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedTransfer:
    """Values made by one segment and copied together from its memory to another.

    It begins as soon as the segment has ended; readers of the copies wait for it.

    Attributes:
        producer: the segment that made them, or `INPUTS`.
        origin, target: numbers of memories.
        values: each as a whole; no other transfer copies them to this memory.
        consumers: the segments that read copies, ascending; empty where only the caller does.
    """

    producer: int
    origin: int
    target: int
    values: tuple[int, ...]
    consumers: tuple[int, ...]


def placed_transfers(
    segments: Sequence[PlacedSegmentValues], home: int, returned: Set[int]
) -> tuple[PlacedTransfer, ...]:
    """The fewest transfers that copy each segment's inputs to its memory.

    A Value is copied once to each memory in which it is read, directly from its origin; Values with
    the same path form one transfer. Transfers of one producer are in the order of their first
    readers; those that only the caller reads are last.

    Args:
        segments: in an order in which they may run.
        home: the memory of inputs and of returned Values.
        returned: the Values that the caller sees.
    """
    made = {value: at for at, one in enumerate(segments) for value in one.outputs}
    values: dict[tuple[int, int], dict[int, None]] = {}
    consumers: dict[tuple[int, int], dict[int, None]] = {}

    def crosses(value: int, target: int, reader: int | None) -> None:
        producer = made.get(value, INPUTS)
        if (home if producer == INPUTS else segments[producer].memory) == target:
            return
        values.setdefault((producer, target), {})[value] = None
        readers = consumers.setdefault((producer, target), {})
        if reader is not None:
            readers[reader] = None

    for at, one in enumerate(segments):
        for value in one.inputs:
            crosses(value, one.memory, at)
    for value in sorted(returned & made.keys()):
        crosses(value, home, None)
    found = [
        PlacedTransfer(
            producer,
            home if producer == INPUTS else segments[producer].memory,
            target,
            tuple(values[producer, target]),
            tuple(consumers[producer, target]),
        )
        for producer, target in values
    ]
    return tuple(sorted(found, key=lambda one: (one.producer, one.consumers or (len(segments),))))


def check_placed_transfers(
    transfers: Sequence[PlacedTransfer],
    segments: Sequence[PlacedSegmentValues],
    home: int,
    returned: Set[int],
) -> None:
    """Prove that transfers copy every Value to its readers, never twice or unread.

    Executes segments and transfers in order, and shares no code with their planner.

    Raises:
        PlanError: a segment or the caller would read a Value that is not there; or a Value is
            copied that is not there yet, is at the target already, or is not read there.
    """
    there: dict[int, set[int]] = {}  # by Value, the memories that hold it
    copied: dict[tuple[int, int], PlacedTransfer] = {}

    def carried_out(producer: int) -> None:
        for one in transfers:
            if one.producer != producer:
                continue
            for value in one.values:
                if one.origin not in there.get(value, ()):
                    raise PlanError(f"%{value} is copied from memory {one.origin}, which lacks it")
                if one.target in there[value]:
                    raise PlanError(f"%{value} is copied to memory {one.target} a second time")
                there[value].add(one.target)
                copied[value, one.target] = one

    for one in segments:
        for value in one.inputs:
            if not any(value in other.outputs for other in segments):
                there[value] = {home}
    carried_out(INPUTS)
    read: set[tuple[int, int]] = set()
    for at, segment in enumerate(segments):
        for value in segment.inputs:
            if segment.memory not in there.get(value, ()):
                raise PlanError(f"segment {at} reads %{value}, which memory {segment.memory} lacks")
            by = copied.get((value, segment.memory))
            if by is not None and at not in by.consumers:
                raise PlanError(f"segment {at} reads %{value} and does not wait for its transfer")
            read.add((value, segment.memory))
        for value in segment.outputs:
            there[value] = {segment.memory}
        carried_out(at)
    for value in returned & there.keys():
        if home not in there[value]:
            raise PlanError(f"the caller reads %{value}, which memory {home} lacks")
        read.add((value, home))
    if vain := copied.keys() - read:
        value, target = min(vain)
        raise PlanError(f"%{value} is copied to memory {target}, where nothing reads it")
