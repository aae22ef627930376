"""Copies, memsets and host tables of a resident graph, on the simulated driver."""

from __future__ import annotations

import ctypes

import pytest
from device_controls import REUSE
from graphs import read, write
from residents import (
    COUNT,
    NUMBERS,
    SIZE_BYTES,
    CopyAndFill,
    Gather,
    plus,
    run,
)

GRANULARITY = 2 << 20


def test_copies_and_memsets_outside_the_arena_are_set_every_time(cuda, arena):
    program = CopyAndFill(cuda, arena)
    x, y, z = (cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT))
    program.bind(x, y, z)
    write(program.resident.arena_address, plus(8))
    assert run(program.resident) == 0  # instantiated with them
    assert read(y, COUNT) == NUMBERS
    assert ctypes.string_at(z, SIZE_BYTES) == b"\x09" * SIZE_BYTES
    assert read(program.resident.arena_address + SIZE_BYTES, COUNT) == plus(8)
    arena_bytes = ctypes.string_at(program.resident.arena_address, SIZE_BYTES)
    assert arena_bytes == b"\x02\x01" * (SIZE_BYTES // 2)
    for _ in range(3):
        assert run(program.resident) == 2  # the two inside the arena stay
    assert cuda.simulator.calls("cuGraphExecMemcpyNodeSetParams") == 3
    assert cuda.simulator.calls("cuGraphExecMemsetNodeSetParams") == 3


def test_memory_allocated_again_at_the_same_address_is_used(cuda, arena):
    cuda.simulator.set_free_policy(REUSE)
    program = CopyAndFill(cuda, arena)
    x, y, z = (cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT))
    program.bind(x, y, z)
    run(program.resident)
    cuda.free(x)
    assert cuda.allocate(plus(2)) == x
    program.bind(x, y, z)
    run(program.resident)
    assert read(y, COUNT) == plus(2)


def test_a_copy_that_moves_is_set_once(cuda, arena):
    program = CopyAndFill(cuda, arena)
    x, y, z = (cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT))
    program.bind(x, y, z)
    run(program.resident)
    program.bind(cuda.allocate(plus(1)), y, z)
    assert run(program.resident) == 2
    assert read(y, COUNT) == plus(1)


# ---- host tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_host_tables_hold_the_addresses_of_each_execution(cuda, arena, given):
    program = Gather(cuda, arena, given=given)
    inputs = [cuda.allocate([index] * COUNT) for index in range(6)]
    outputs = [cuda.allocate([0] * COUNT) for _ in range(5)]
    for index, y in enumerate(outputs):  # nothing runs before a wait
        program.bind(inputs[index], inputs[index + 1], y)
        program.resident.execute()
    program.resident.finish()
    assert [read(y, 1) for y in outputs] == [[2 * index + 1] for index in range(5)]


def test_only_executions_before_the_last_change_of_a_table_are_waited_for(cuda, arena):
    program = Gather(cuda, arena, given=True)
    x = cuda.allocate([1] * COUNT)
    outputs = [cuda.allocate([0] * COUNT) for _ in range(3)]
    others = [cuda.allocate([index] * COUNT) for index in range(3)]
    for y, other in zip(outputs[:2], others, strict=False):
        program.bind(x, other, y)
        program.resident.execute()
    assert [read(y, 1) for y in outputs] == [[0], [0], [0]]
    program.bind(x, others[2], outputs[2])
    program.resident.execute()
    assert [read(y, 1) for y in outputs] == [[1], [0], [0]]
    program.resident.finish()
    assert [read(y, 1) for y in outputs] == [[1], [2], [3]]


def test_unchanged_tables_are_written_once(cuda, arena):
    program = Gather(cuda, arena, given=True)
    x, y = cuda.allocate([1] * COUNT), cuda.allocate([0] * COUNT)
    program.bind(x, x, y)
    run(program.resident)
    assert run(program.resident) == 0
    program.bind(x, x, cuda.allocate([0] * COUNT))
    assert run(program.resident) == 2  # the table was patched, with its content
