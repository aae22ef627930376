"""Proof of executions whose segments are given to devices one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.errors import PlanError
from offload.plan.placed_transfers import INPUTS


class DispatchRules:
    """What is the same in each execution of placed segments.

    Attributes:
        inputs, outputs: the Values that each segment takes, and those that it makes.
        after: the segments that each one waits for.
        home: the memory of inputs and of returned Values.
        returned: the Values that the caller sees.
    """

    def __init__(
        self,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        after: Sequence[Sequence[int]],
        home: int,
        returned: Iterable[int],
    ) -> None:
        """Find what the caller gives, and what of its Values is made."""
        self.inputs, self.outputs = inputs, outputs
        self.after = [tuple(one) for one in after]
        self.home = home
        made = {value for one in outputs for value in one}
        self.given = {value for one in inputs for value in one} - made
        self.returned = made.intersection(returned)


class DispatchCheck:
    """Proves each step of one execution before it is taken.

    A segment begins once, after those that it waits for, in a memory that has all that it reads; a
    Value is copied from a memory that has it, and to each memory once; in the end the caller's
    memory has what is returned. Shares no code with the dispatch that decides the steps.

    Owner: one execution. Thread: one at a time.
    """

    def __init__(self, rules: DispatchRules) -> None:
        """Begin with the caller's Values in its memory."""
        self._rules = rules
        self._there = {(value, rules.home) for value in rules.given}
        self._on_way: set[tuple[int, int]] = set()
        self._begun: dict[int, int] = {}  # the memory by segment
        self._ended: set[int] = set()

    def copied(self, producer: int, origin: int, target: int, values: Sequence[int]) -> None:
        """Note a copy that begins.

        Raises:
            PlanError: the origin lacks a Value, or it is there or on its way already.
        """
        if producer != INPUTS and producer not in self._ended:
            raise PlanError(f"values of segment {producer} are copied before it has ended")
        for value in values:
            if (value, origin) not in self._there:
                raise PlanError(f"%{value} is copied from memory {origin}, which lacks it")
            if (value, target) in self._there or (value, target) in self._on_way:
                raise PlanError(f"%{value} is copied to memory {target} a second time")
            self._on_way.add((value, target))

    def arrived(self, target: int, values: Sequence[int]) -> None:
        """Note a copy that has ended."""
        for value in values:
            self._on_way.remove((value, target))
            self._there.add((value, target))

    def begun(self, segment: int, memory: int) -> None:
        """Note a segment that begins.

        Raises:
            PlanError: it has begun before, a segment that it waits for has not ended, or its memory
                lacks what it reads.
        """
        if segment in self._begun:
            raise PlanError(f"segment {segment} begins a second time")
        for one in self._rules.after[segment]:
            if one not in self._ended:
                raise PlanError(f"segment {segment} begins before segment {one} has ended")
        for value in self._rules.inputs[segment]:
            if (value, memory) not in self._there:
                raise PlanError(f"segment {segment} reads %{value}, which memory {memory} lacks")
        self._begun[segment] = memory

    def ended(self, segment: int) -> None:
        """Note a segment that has ended: what it makes is in its memory."""
        memory = self._begun[segment]
        self._ended.add(segment)
        for value in self._rules.outputs[segment]:
            self._there.add((value, memory))

    def finished(self) -> None:
        """Note the end of the execution.

        Raises:
            PlanError: a segment has not ended, or the caller's memory lacks a returned Value.
        """
        if len(self._ended) != len(self._rules.inputs):
            raise PlanError("an execution ends before its segments have")
        for value in self._rules.returned:
            if (value, self._rules.home) not in self._there:
                raise PlanError(f"the caller reads %{value}, which its memory lacks")
