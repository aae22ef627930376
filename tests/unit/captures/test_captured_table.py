"""Argument blocks of a captured Ascend model that move into one table, on made-up captures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from model_captures import BLOCK_BYTES, IN, KERNELS, LAYOUTS, OUT, POOL, SELF, Word, captured, chain

from offload.backends.ascend.captured_table import NoTable, TableParts, table_parts
from offload.backends.ascend.captured_tasks import ModelCapture
from offload.backends.ascend.captured_words import relocated_words
from offload.backends.captured.relocation.words import Unexplained
from offload.program import Program


def numbered(captures: Sequence[ModelCapture]) -> list[ModelCapture]:
    """With tasks between the launches' that are not compared: every second one."""
    return [
        dataclasses.replace(
            one,
            tasks=[
                dataclasses.replace(task, number=2 * index + 1)
                for index, task in enumerate(one.tasks)
            ],
        )
        for one in captures
    ]


def parts_of(program: Program, kernels: Sequence[Sequence[Word]], **more: object) -> TableParts:
    captures = numbered(captured(program, kernels, **more))  # type: ignore[arg-type]
    return table_parts(program, captures, relocated_words(program, captures))


def test_blocks_words_and_what_points_into_its_own_block() -> None:
    program = chain()
    captures = numbered(captured(program, KERNELS))
    parts = table_parts(program, captures, relocated_words(program, captures))
    blocks = LAYOUTS[0][2]
    assert parts.kernels == [
        (2 * index + 1, blocks + BLOCK_BYTES * index, captures[0].tasks[index].arguments)
        for index in range(3)
    ]
    assert parts.words == [
        (0, 8, True),  # the input
        (0, 16, False),
        (1, 8, False),
        (1, 16, False),
        (2, 8, False),
        (2, 16, True),  # the output
    ]
    assert parts.own == [(0, 0, 24), (1, 0, 24), (2, 0, 24)]


def test_a_kernel_without_words_keeps_its_block() -> None:
    program = chain()
    kernels = [*KERNELS, [(SELF, 16), 5]]
    parts = parts_of(program, kernels, launches=[0, 1, 2, 2])
    assert [number for number, _, _ in parts.kernels] == [1, 3, 5]
    assert {block for block, _, _ in parts.own} == {0, 1, 2}


def test_numbers_that_look_like_an_own_address_stay() -> None:
    """The same in all captures, though blocks move: the block's address in the first capture."""
    program = chain()
    blocks = LAYOUTS[0][2]
    for number in (blocks, blocks + 8, blocks + 40):
        kernels = [[*KERNELS[0], number], *KERNELS[1:]]
        assert parts_of(program, kernels).own == [(0, 0, 24), (1, 0, 24), (2, 0, 24)]


def test_several_own_addresses_and_one_behind_the_block() -> None:
    program = chain()
    kernels: list[list[Word]] = [
        [(SELF, 32), (IN, 0), (POOL, 0), (SELF, 40), 1, 2],
        KERNELS[1],
        [(SELF, 0), (POOL, 512), (OUT, 0), (SELF, 32)],
    ]
    assert parts_of(program, kernels).own == [
        (0, 0, 32),
        (0, 24, 40),
        (1, 0, 24),
        (2, 0, 0),
        (2, 24, 32),
    ]


def test_where_blocks_lie_alike_in_all_captures_nothing_tells_a_number_from_an_address() -> None:
    program = chain()
    blocks = LAYOUTS[0][2]
    layouts = [(at, pool, blocks) for at, pool, _ in LAYOUTS]
    with pytest.raises(
        NoTable, match=r"task 0 had its arguments at one place.* byte 0 "
    ) as refused:
        parts_of(program, KERNELS, layouts=layouts)
    assert not refused.value.is_spoiled
    plain: list[list[Word]] = [[0, *words[1:3], 7] for words in KERNELS]
    assert parts_of(program, plain, layouts=layouts).own == []


def test_an_address_in_the_block_of_another_kernel_is_refused() -> None:
    program = chain()
    kernels = [[*KERNELS[0], (SELF, BLOCK_BYTES + 8)], *KERNELS[1:]]
    with pytest.raises(NoTable, match=r"task 0 has at byte 32 .* in those of task 1"):
        parts_of(program, kernels)
    number = LAYOUTS[0][2] + BLOCK_BYTES + 8  # the same in all captures
    assert len(parts_of(program, [[*KERNELS[0], number], *KERNELS[1:]]).own) == 3


def test_a_block_with_a_word_that_nobody_explains_does_not_move() -> None:
    program = chain()
    captures = captured(program, KERNELS)
    found = relocated_words(program, captures)
    doubtful = Unexplained(1, 0, 24, "aten::mul: differs between captures")
    discovery = dataclasses.replace(found.discovery, unexplained=(doubtful,))
    with pytest.raises(NoTable, match="aten::mul: differs between captures"):
        table_parts(program, captures, dataclasses.replace(found, discovery=discovery))
