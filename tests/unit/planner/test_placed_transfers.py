"""Transfers between memories: the fewest that suffice, and a checker that refuses all others."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.plan.placed_transfers import (
    INPUTS,
    PlacedSegmentValues,
    PlacedTransfer,
    check_placed_transfers,
    placed_transfers,
)


def drawn(seed):
    """Random segments in some memories that read earlier results, and what the caller sees."""
    draw = random.Random(seed)
    n_memories, n_inputs = draw.randint(1, 3), draw.randint(1, 3)
    known, segments, value = list(range(n_inputs)), [], n_inputs
    for _ in range(draw.randint(1, 6)):
        inputs = tuple(draw.sample(known, draw.randint(0, min(3, len(known)))))
        outputs = tuple(range(value, value + draw.randint(1, 2)))
        value += len(outputs)
        segments.append(PlacedSegmentValues(draw.randrange(n_memories), inputs, outputs))
        known += outputs
    made = [value for one in segments for value in one.outputs]
    return segments, set(draw.sample(made, draw.randint(1, len(made))))


def needed(segments, returned, home=0):
    """By value and memory, the copies needed there, computed independently."""
    made = {value: one.memory for one in segments for value in one.outputs}
    reads = {(value, one.memory) for one in segments for value in one.inputs}
    reads |= {(value, home) for value in returned}
    return {(value, memory) for value, memory in reads if made.get(value, home) != memory}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_each_value_is_copied_once_to_each_memory_that_reads_it(seed):
    segments, returned = drawn(seed)
    found = placed_transfers(segments, 0, returned)
    check_placed_transfers(found, segments, 0, returned)
    copied = [(value, one.target) for one in found for value in one.values]
    assert len(copied) == len(set(copied))
    assert set(copied) == needed(segments, returned)
    ways = [(one.producer, one.target) for one in found]
    assert len(ways) == len(set(ways))  # values with the same way are grouped
    assert [one.producer for one in found] == sorted(one.producer for one in found)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_checker_refuses_any_other_transfers(seed):
    segments, returned = drawn(seed)
    found = placed_transfers(segments, 0, returned)
    for at, one in enumerate(found):
        rest = [*found[:at], *found[at + 1 :]]
        others = [rest, [*found, one]]  # one is missing; one is made twice
        others += [
            [*rest, dataclasses.replace(one, values=one.values[:-1])],
            [*rest, dataclasses.replace(one, origin=one.target)],
            *(
                [[*rest, dataclasses.replace(one, consumers=one.consumers[1:])]]
                * bool(one.consumers)
            ),
        ]
        if one.producer > INPUTS:
            others.append([*rest, dataclasses.replace(one, producer=one.producer - 1)])
        for other in others:
            with pytest.raises(PlanError):
                check_placed_transfers(other, segments, 0, returned)


def test_the_checker_says_what_is_wrong():
    segments = [PlacedSegmentValues(0, (0,), (1,)), PlacedSegmentValues(1, (1,), (2,))]
    there = PlacedTransfer(0, 0, 1, (1,), (1,))
    back = PlacedTransfer(1, 1, 0, (2,), ())
    assert placed_transfers(segments, 0, {2}) == (there, back)
    for transfers, message in (
        ([back], "segment 1 reads %1, which memory 1 lacks"),
        ([there], "the caller reads %2, which memory 0 lacks"),
        ([there, back, there], "%1 is copied to memory 1 a second time"),
        ([dataclasses.replace(there, consumers=()), back], "does not wait for its transfer"),
        ([there, back, PlacedTransfer(0, 0, 2, (1,), ())], "memory 2, where nothing reads it"),
        ([there, dataclasses.replace(back, producer=0)], "%2 is copied from memory 1, which lacks"),
    ):
        with pytest.raises(PlanError, match=message):
            check_placed_transfers(transfers, segments, 0, {2})
