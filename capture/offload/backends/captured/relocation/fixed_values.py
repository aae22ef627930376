"""Values at fixed addresses, as a word depends on their addresses in a form that is not followed.

It is unknown on which Value such a word depends: a hash, or the difference of two addresses, may
concern any that its launch uses. So some of them get memory of the graph's own, at the same
addresses in other captures of all layouts. A word that is the same in all of these depends on
nothing that moved, and may stay unchanged. First the Values of its launch that no word names are
tried, and then all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set

from offload.backends.captured.copied_values import why_uncopiable
from offload.backends.captured.relocation.captures import GraphCapture, OwnedRange
from offload.backends.captured.relocation.words import (
    WORD_BYTES,
    CapturesDiffer,
    Discovery,
    Unexplained,
)
from offload.errors import CaptureError
from offload.program import Program, Role

FIXED_OWNER = "the graph's own memory for "
"""The owner of fixed memory: this text, followed by the name of what is in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class FixedAllocation:
    """An allocation of a captured program that gets a fixed address.

    Attributes:
        number: of the allocation in each capture.
        value: the Value that it holds; None for an operator's scratch memory.
        name: for messages.
        size_bytes: of the allocation.
        why: the first word that may depend on it, and why that cannot be followed.
    """

    number: int
    value: int | None
    name: str
    size_bytes: int
    why: str

    @property
    def owner(self) -> str:
        """The owner of its memory."""
        return FIXED_OWNER + self.name


Choice = tuple[FixedAllocation, ...]


def choices(program: Program, capture: GraphCapture, found: Discovery) -> Iterator[Choice]:
    """Choices of allocations to fix so that all words are explained, the fewest first.

    Weights are excluded: their memory is the caller's, and executions do not copy them. So are
    inputs that cannot be copied.

    Args:
        program: the captured Program.
        capture: of it.
        found: its words, some of which are unexplained.
    """
    unnamed: dict[int, FixedAllocation] = {}
    every: dict[int, FixedAllocation] = {}
    names = _Names(program, capture, found)
    for launch, one in _first_of_launches(capture, found).items():
        named = names.of_launch(launch)
        used = _allocations_of(program, capture, launch)
        for number in used | named | names.of_nobody():
            value = capture.allocations[number].value
            if value is not None and not _may_stay(program, value):
                continue
            fixed = _fixed(program, capture, number, one)
            every.setdefault(number, fixed)
            if number in used - named:
                unnamed.setdefault(number, fixed)
    seen: list[Choice] = []
    for some in (unnamed, every):
        choice = tuple(some[number] for number in sorted(some))
        if choice and choice not in seen:
            seen.append(choice)
            yield choice


def refuse(program: Program, capture: GraphCapture, found: Discovery) -> CaptureError:
    """The error for words that stay unexplained with everything fixed that may be."""
    first = found.unexplained[0]
    launch = capture.launches[first.node]
    reasons = [
        why_uncopiable(program, value)
        for value in (_touched(program, launch) if launch >= 0 else ())
        if program.values[value].role in (Role.INPUT, Role.OUTPUT)
    ]
    why = next(filter(None, reasons), "")
    more = (
        f" (the operands of its launch cannot stay at one address: {why})"
        if why
        else " (also where the inputs and results of its launch stay at one address)"
    )
    return CaptureError(f"{first.why}{more}; {first.advice}")


def with_fixed(
    capture: GraphCapture, fixed: Sequence[FixedAllocation], addresses: Sequence[int]
) -> GraphCapture:
    """A capture in which these allocations had these addresses, as ranges for constants.

    Raises:
        CapturesDiffer: another Value is there.
    """
    numbers = {one.number for one in fixed}
    for one, address in zip(fixed, addresses, strict=True):
        there = capture.allocations[one.number] if one.number < len(capture.allocations) else None
        if there is None or (there.address, there.value) != (address, one.value):
            raise CapturesDiffer("the graph", f"another capture has {one.name} at another address")
    owned = [
        OwnedRange(address, one.size_bytes, one.owner)
        for one, address in zip(fixed, addresses, strict=True)
    ]
    allocations = [one for number, one in enumerate(capture.allocations) if number not in numbers]
    return dataclasses.replace(capture, allocations=allocations, owned=[*owned, *capture.owned])


class _Names:
    """The allocations that the words of each launch name."""

    def __init__(self, program: Program, capture: GraphCapture, found: Discovery) -> None:
        self._allocations = capture.allocations
        number_of = {one.value: number for number, one in enumerate(capture.allocations)}
        number_at = {one.address: number for number, one in enumerate(capture.allocations)}
        self._of_launch: dict[int, set[int]] = {}
        for word in found.words:
            number = number_of.get(word.value)
            if number is None and word.size_bytes == WORD_BYTES:  # of scratch memory
                content = capture.nodes[word.node].parts[word.part][word.offset_bytes :]
                address = int.from_bytes(content[:WORD_BYTES], "little")
                number = number_at.get(address - word.value_offset_bytes)
            if number is not None:
                self._of_launch.setdefault(capture.launches[word.node], set()).add(number)

    def of_launch(self, launch: int) -> Set[int]:
        return self._of_launch.get(launch, set())

    def of_nobody(self) -> Set[int]:
        """Scratch memory that a launch has requested and no word names."""
        named = set().union(*self._of_launch.values())
        return {
            number
            for number, one in enumerate(self._allocations)
            if one.value is None and one.size_bytes and number not in named
        }


def _first_of_launches(capture: GraphCapture, found: Discovery) -> dict[int, Unexplained]:
    first: dict[int, Unexplained] = {}
    for one in found.unexplained:
        first.setdefault(capture.launches[one.node], one)
    return first


def _touched(program: Program, launch: int) -> list[int]:
    one = program.launches[launch]
    return sorted({*one.reads, *one.writes})


def _allocations_of(program: Program, capture: GraphCapture, launch: int) -> Set[int]:
    """The allocations of a launch's Values; empty for nodes without a launch."""
    touched = _touched(program, launch) if launch >= 0 else []
    return {
        number
        for number, one in enumerate(capture.allocations)
        if one.value in touched and one.size_bytes
    }


def _may_stay(program: Program, value: int) -> bool:
    role = program.values[value].role
    if role in (Role.INPUT, Role.OUTPUT):
        return not why_uncopiable(program, value)
    return role is Role.ACTIVATION


def _fixed(
    program: Program, capture: GraphCapture, number: int, one: Unexplained
) -> FixedAllocation:
    allocation = capture.allocations[number]
    name = (
        f"scratch memory {number}"
        if allocation.value is None
        else program.values[allocation.value].name
    )
    return FixedAllocation(number, allocation.value, name, allocation.size_bytes, one.why)
