"""Words that move in a captured Ascend model, found in made-up captures."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import torch
from model_captures import (
    BLOCK_BYTES,
    CELLS,
    IN,
    KERNELS,
    LAYOUTS,
    OFFSET,
    OUT,
    POOL,
    POOL_BYTES,
    SEED,
    SELF,
    captured,
    chain,
    program_of,
    values,
    words_of,
)

import offload
from offload.backends.ascend.captured_tasks import ModelCapture
from offload.backends.ascend.captured_words import relocated_words
from offload.backends.captured.relocation.captures import OwnedRange
from offload.backends.captured.relocation.words import CapturesDiffer


def test_words_move_with_input_output_and_pool() -> None:
    program = chain()
    found = relocated_words(program, captured(program, KERNELS))
    assert words_of(program, found) == {
        (0, 8, "x", 0),
        (0, 16, POOL, 0),  # the output's bytes, before the output exists
        (1, 8, POOL, 0),
        (1, 16, POOL, 512),
        (2, 8, POOL, 512),
        (2, 16, "out", 0),
    }
    assert (found.copied, found.why_fixed) == ({}, "")
    assert found.discovery.scratch_bytes == (POOL_BYTES,)


def test_words_into_their_own_block_are_never_patched() -> None:
    """Class self: where blocks are reused in another capture, and where they are not."""
    program = chain()
    for layouts in (LAYOUTS, [LAYOUTS[0], LAYOUTS[2], LAYOUTS[1]]):
        found = relocated_words(program, captured(program, KERNELS, layouts=layouts))
        assert {word.offset_bytes for word in found.discovery.words} == {8, 16}


def test_addresses_of_seed_and_offset_have_an_owner_in_each_capture() -> None:
    program = chain()
    kernels = [[(SELF, 40), (SEED, 0), (OFFSET, 0), *KERNELS[0][1:]], *KERNELS[1:]]
    found = relocated_words(program, captured(program, kernels))
    assert {
        (one.node, one.offset_bytes, one.owner)
        for one in found.discovery.constants
        if "generator" in one.owner
    } == {
        (0, 8, "torch's random state: seed of generator 0"),
        (0, 16, "torch's random state: offset of generator 0"),
    }
    assert len(found.discovery.words) == 6
    assert (found.copied, found.why_fixed) == ({}, "")


def test_a_seed_where_another_capture_has_an_offset_is_refused() -> None:
    program = chain()
    kernels = [[*KERNELS[0], (SEED, 0)], *KERNELS[1:]]
    captures = captured(program, kernels)
    captures[2] = dataclasses.replace(captures[2], cells=[CELLS[2][::-1]])
    with pytest.raises(offload.CaptureError, match="is not an address of an allocation"):
        relocated_words(program, captures)


def test_integers_that_look_like_addresses_stay() -> None:
    """Of the input, of the pool and of an argument block: in one capture, which then has others."""
    program = chain()
    at, pool, blocks = LAYOUTS[0]
    for look_alike in (at, at + 8, pool + 512, blocks + BLOCK_BYTES + 8, LAYOUTS[1][1]):
        kernels = [[*words[:3], look_alike] for words in KERNELS]
        found = relocated_words(program, captured(program, kernels))
        assert len(found.discovery.words) == 6
        assert all(word.offset_bytes < 24 for word in found.discovery.words)


def test_pieces_of_the_pool_that_lie_side_by_side_everywhere() -> None:
    """Where one piece ends the next begins: the address belongs to the next one."""
    program = chain()
    captures = [
        dataclasses.replace(one, pool=[(pool, 512), (pool + 512, POOL_BYTES)])
        for one in captured(program, KERNELS)
        for ((pool, _),) in [one.pool]
    ]
    found = relocated_words(program, captures)
    first = len(program.values)
    assert found.discovery.scratch_bytes == (512, POOL_BYTES)
    assert {
        (word.node, word.offset_bytes, word.value, word.value_offset_bytes)
        for word in found.discovery.words
        if word.value >= first
    } == {(0, 16, first, 0), (1, 8, first, 0), (1, 16, first + 1, 0), (2, 8, first + 1, 0)}


def test_interior_addresses_keep_their_offset() -> None:
    program = chain()
    kernels = [list(words) for words in KERNELS]
    kernels[0][1], kernels[2][2] = (IN, 128), (OUT, 64)
    kernels[1].append((POOL, 600))
    found = words_of(program, relocated_words(program, captured(program, kernels)))
    assert {(0, 8, "x", 128), (2, 16, "out", 64), (1, 32, POOL, 600)} <= found


def test_a_later_launch_names_the_output() -> None:
    """A write in place after it was made."""
    program = program_of(lambda x: ((x + 1) * 2).relu().add_(x), torch.ones(64))
    kernels = [*KERNELS, [(SELF, 24), (OUT, 0), (IN, 0), 0]]
    found = words_of(program, relocated_words(program, captured(program, kernels)))
    assert {(2, 16, "out", 0), (3, 8, "out", 0), (3, 16, "x", 0)} <= found


def test_an_address_that_is_right_in_two_captures_only_is_not_followed() -> None:
    program = chain()
    captures = captured(program, KERNELS)
    third = captures[2]
    task = third.tasks[0]
    words = list(struct.unpack("<4Q", task.arguments))
    words[1] += 8
    captures[2] = dataclasses.replace(
        third,
        tasks=[
            dataclasses.replace(task, arguments=struct.pack("<4Q", *words)),
            *third.tasks[1:],
        ],
    )
    found = relocated_words(program, captures)
    assert set(found.copied) == {values(program)["x"]}
    assert "differs between captures" in found.why_fixed


@pytest.mark.parametrize("change", ["function", "n_blocks", "launch", "arguments"])
def test_captures_of_other_kernels_differ(change: str) -> None:
    program = chain()
    captures = captured(program, KERNELS)
    task = captures[1].tasks[1]
    changed = {"function": 1, "n_blocks": 9, "launch": 0, "arguments": task.arguments[:-8]}
    tasks = list(captures[1].tasks)
    tasks[1] = dataclasses.replace(task, **{change: changed[change]})
    captures[1] = dataclasses.replace(captures[1], tasks=tasks)
    with pytest.raises(CapturesDiffer):
        relocated_words(program, captures)


def test_an_output_at_another_place_of_the_pool_is_copied() -> None:
    program = chain()
    captures = captured(program, KERNELS)
    out = values(program)["out"]
    moved = dict(captures[2].places)
    moved[out] += 1024
    captures[2] = dataclasses.replace(captures[2], places=moved)
    found = relocated_words(program, captures)
    assert "one place of the pool" in found.copied[out]


def test_weights_are_constants_of_the_programs() -> None:
    program = chain()
    weight = 0x7100_0000_0000
    kernels = [[*KERNELS[0][:3], weight + 64], *KERNELS[1:]]
    found = relocated_words(
        program, captured(program, kernels), [OwnedRange(weight, 4096, "weight w")]
    )
    owners = {one.owner for one in found.discovery.constants}
    assert "weight w" in owners
    assert len(found.discovery.words) == 6


def test_an_address_that_nobody_keeps_is_refused_among_arguments_only() -> None:
    """For example a workspace outside the pool, which may be freed and allocated again."""
    program = chain()
    somebodys, owned = 0x7200_0000_0000, 0x7200_0000_1000
    others = [(somebodys, 1 << 20), *((pool, POOL_BYTES) for _, pool, _ in LAYOUTS)]
    weights = [OwnedRange(owned, 4096, "weight w")]

    def with_argument(address: int) -> list[ModelCapture]:
        kernels = [[(SELF, 32), (IN, 0), (POOL, 0), address, somebodys + 8], *KERNELS[1:]]
        return captured(program, kernels)

    for allowed in (owned + 8, 0, somebodys - 1, somebodys + (1 << 20)):
        found = relocated_words(program, with_argument(allowed), weights, others)
        assert len(found.discovery.words) == 6
    for address in (somebodys, somebodys + 512, LAYOUTS[1][1] + 64):
        with pytest.raises(offload.CaptureError, match=r"aten::add.*byte 24 is always 0x.*neither"):
            relocated_words(program, with_argument(address), weights, others)
