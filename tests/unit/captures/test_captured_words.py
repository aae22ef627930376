"""Words that move in a captured Ascend model, found in made-up captures."""

from __future__ import annotations

import dataclasses
import re
import struct

import pytest
import torch
from model_captures import (
    BLOCK_BYTES,
    CELLS,
    IN,
    KERNELS,
    LAYOUTS,
    LOOK_ALIKE,
    OFFSET,
    OUT,
    POOL,
    POOL_BYTES,
    SEED,
    SELF,
    Word,
    captured,
    chain,
    program_of,
    values,
)

import offload
from offload.backends.ascend.captured_tasks import ModelCapture, Task, TaskType
from offload.backends.ascend.captured_words import RelocatedWords, relocated_words
from offload.backends.captured.relocation.captures import OwnedRange
from offload.backends.captured.relocation.words import CapturesDiffer
from offload.program import Program, Role


def words_of(program: Program, found: RelocatedWords) -> set[tuple[int, int, str, int]]:
    """(task, byte, Value's name, offset) of each word."""
    names = {index: name for name, index in values(program).items()}
    names[len(program.values)] = POOL
    return {
        (word.node, word.offset_bytes, names[word.value], word.value_offset_bytes)
        for word in found.discovery.words
    }


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


def test_an_output_that_its_launch_names_twice_is_copied() -> None:
    """The first kernel may have used the memory before: then it could be longer."""
    program = chain()
    kernels = [*KERNELS[:2], [(SELF, 24), (POOL, 512), (OUT, 0), 0], KERNELS[2]]
    captures = captured(program, kernels, launches=[0, 1, 2, 2])
    found = relocated_words(program, captures)
    out = values(program)["out"]
    assert set(found.copied) == {out}
    assert "2 kernels of aten::relu" in found.copied[out]
    assert "is copied" in found.why_fixed
    assert words_of(program, found) == {(0, 8, "x", 0)}
    assert found.discovery.scratch_bytes == ()


@pytest.mark.parametrize(
    ("launch", "copied"), [(0, {"x"}), (1, set()), (2, {"out"})], ids=["input", "between", "output"]
)
def test_what_an_unreadable_task_touches_is_copied_or_stays(launch: int, copied: set[str]) -> None:
    program = chain()
    captures = captured(program, KERNELS, types={launch: TaskType.DEFAULT})
    captures = [
        dataclasses.replace(
            one,
            tasks=[
                task if task.is_kernel else dataclasses.replace(task, arguments=b"")
                for task in one.tasks
            ],
        )
        for one in captures
    ]
    found = relocated_words(program, captures)
    names = values(program)
    assert set(found.copied) == {names[name] for name in copied}
    assert all("cannot be read" in why for why in found.copied.values())
    assert found.why_fixed
    assert {name for _, _, name, _ in words_of(program, found)} == {"x", "out"} - copied


@pytest.mark.parametrize(
    ("launch", "copied"), [(0, {"x"}), (1, set()), (2, {"out"})], ids=["input", "between", "output"]
)
def test_what_a_launch_without_tasks_touches_is_copied_or_stays(
    launch: int, copied: set[str]
) -> None:
    """The runtime does not return tasks of the AI CPU."""
    program = chain()
    kernels = [*KERNELS[:launch], *KERNELS[launch + 1 :]]
    rest = [index for index in range(3) if index != launch]
    found = relocated_words(program, captured(program, kernels, launches=rest))
    names = values(program)
    assert set(found.copied) == {names[name] for name in copied}
    assert all("reports no task" in why for why in found.copied.values())
    assert found.why_fixed
    assert {name for _, _, name, _ in words_of(program, found)} == {"x", "out"} - copied


def test_a_launch_without_tasks_that_writes_an_input_fixes_the_pool() -> None:
    """The number of its tasks is unknown: they may pass memory to each other."""
    program = program_of(lambda x, y: (x + 1, y.mul_(2)), torch.ones(64), torch.ones(64))
    x, y = (value.index for value in program.of_role(Role.INPUT))
    (out,) = (value.index for value in program.of_role(Role.OUTPUT))
    captures = [
        ModelCapture(
            [Task(TaskType.KERNEL, 0xF0, 1, block, struct.pack("<2Q", at, pool), 0)],
            {x: at, y: at + 4096, out: pool},
            [(pool, POOL_BYTES)],
        )
        for at, pool, block in LAYOUTS
    ]
    found = relocated_words(program, captures)
    assert set(found.copied) == {y}
    assert "reports no task of aten::mul" in found.why_fixed
    assert {word.value for word in found.discovery.words} == {x, out}


def test_a_launch_without_tasks_and_content_is_followed() -> None:
    program = program_of(lambda x, y: (x + 1, y + 1), torch.ones(64), torch.ones(0))
    (x, _), (out, empty) = program.of_role(Role.INPUT), program.of_role(Role.OUTPUT)
    captures = [
        ModelCapture(
            [Task(TaskType.KERNEL, 0xF0, 1, block, struct.pack("<2Q", at, pool), 0)],
            {x.index: at, out.index: pool, empty.index: 0},
            [(pool, POOL_BYTES)],
        )
        for at, pool, block in LAYOUTS
    ]
    found = relocated_words(program, captures)
    assert (found.copied, found.why_fixed) == ({}, "")
    assert {word.value for word in found.discovery.words} == {x.index, out.index}


def test_events_touch_nothing() -> None:
    program = chain()
    kernels: list[list[Word]] = [*KERNELS, []]
    captures = captured(
        program, kernels, launches=[0, 1, 2, 1], types={3: int(TaskType.EVENT_RECORD)}
    )
    found = relocated_words(program, captures)
    assert (found.copied, found.why_fixed) == ({}, "")


@pytest.mark.parametrize("has_kernel", [False, True])
def test_an_unreadable_task_beside_a_kernel_may_use_scratch_memory(has_kernel: bool) -> None:
    """A task that is a launch's only one uses only memory that the launch reads and writes."""
    program = program_of(lambda x, y: (x + 1, y.mul_(2)), torch.ones(64), torch.ones(64))
    x, y = (value.index for value in program.of_role(Role.INPUT))
    (out,) = (value.index for value in program.of_role(Role.OUTPUT))
    captures = []
    for at, pool, block in LAYOUTS:
        tasks = [Task(TaskType.KERNEL, 0xF0, 1, block, struct.pack("<2Q", at, pool), 0)]
        tasks.append(Task(TaskType.DEFAULT, 0, 0, 0, b"", 1))
        if has_kernel:
            content = struct.pack("<2Q", at + 4096, pool + 512)
            tasks.append(Task(TaskType.KERNEL, 0xF1, 1, block + BLOCK_BYTES, content, 1))
        places = {x: at, y: at + 4096, out: pool}
        captures.append(ModelCapture(tasks, places, [(pool, POOL_BYTES)]))
    found = relocated_words(program, captures)
    assert set(found.copied) == {y}
    assert {word.value for word in found.discovery.words} == {x, out}
    assert bool(found.why_fixed) == has_kernel


def test_an_unreadable_task_that_reads_the_pool_fixes_it() -> None:
    program = program_of(lambda x, y: y.copy_(x + 1), torch.ones(64), torch.ones(64))
    x, y = (value.index for value in program.of_role(Role.INPUT))
    (between,) = (value.index for value in program.of_role(Role.ACTIVATION))
    captures = []
    for at, pool, block in LAYOUTS:
        tasks = [
            Task(TaskType.KERNEL, 0xF0, 1, block, struct.pack("<2Q", at, pool), 0),
            Task(TaskType.DEFAULT, 0, 0, 0, b"", 1),
        ]
        places = {x: at, y: at + 4096, between: pool}
        captures.append(ModelCapture(tasks, places, [(pool, POOL_BYTES)]))
    found = relocated_words(program, captures)
    assert set(found.copied) == {y}
    assert "aten::copy_" in found.why_fixed
    assert {word.value for word in found.discovery.words} == {x}


def test_an_output_that_no_word_names_is_copied() -> None:
    program = chain()
    kernels = [*KERNELS[:2], [*KERNELS[2][:2], 7, KERNELS[2][3]]]
    found = relocated_words(program, captured(program, kernels))
    (why,) = found.copied.values()
    assert set(found.copied) == {values(program)["out"]}
    assert "no argument of aten::relu" in why
    assert found.why_fixed


def test_an_activation_that_no_word_names_fixes_the_pool() -> None:
    program = chain()
    kernels = [KERNELS[0], [*KERNELS[1][:2], 7, KERNELS[1][3]], KERNELS[2]]
    found = relocated_words(program, captured(program, kernels))
    assert "no argument of aten::mul" in found.why_fixed
    assert {name for _, _, name, _ in words_of(program, found)} == {"x", "out"}


def test_an_input_of_which_a_launch_takes_the_shape_alone_is_followed() -> None:
    program = program_of(lambda x: (torch.full_like(x, 3) + x).relu(), torch.ones(64))
    assert values(program)["x"] in program.launches[0].reads
    kernels = [
        [(SELF, 16), (POOL, 0), LOOK_ALIKE],
        [(SELF, 32), (POOL, 0), (IN, 0), (POOL, 512), LOOK_ALIKE],
        KERNELS[2],
    ]
    found = relocated_words(program, captured(program, kernels))
    assert (found.copied, found.why_fixed) == ({}, "")
    assert (1, 16, "x", 0) in words_of(program, found)


@pytest.mark.parametrize(
    "numbers",
    [(5, 6, 7), (LAYOUTS[0][2] + 8, LAYOUTS[1][2] + 264, LAYOUTS[2][1])],
    ids=["numbers", "stale addresses"],
)
@pytest.mark.parametrize(("launch", "copied"), [(0, {"x"}), (1, set()), (2, {"out"})])
def test_what_a_kernel_with_an_unexplained_word_touches_is_copied_or_stays(
    launch: int, copied: set[str], numbers: tuple[int, int, int]
) -> None:
    program = chain()
    noise = {number: (launch, one) for number, one in enumerate(numbers)}
    found = relocated_words(program, captured(program, KERNELS, noise=noise))
    names = values(program)
    shown = ", ".join(f"0x{one:x}" for one in (numbers[0], *numbers))
    why = rf"aten::.* byte 32.*differs between captures and is not an address.*{shown}"
    assert set(found.copied) == {names[name] for name in copied}
    assert all(re.search(why, one) for one in found.copied.values())
    assert re.search(why, found.why_fixed)
    # The other words are followed.
    assert {name for _, _, name, _ in words_of(program, found)} == {"x", "out"} - copied
    noise[2] = (launch, 8)  # noise has other values each time, and the choice stays the same
    again = relocated_words(program, captured(program, KERNELS, noise=noise))
    assert again.same_choice(found)


def test_an_unexplained_word_fixes_the_pool_that_its_launch_may_have_scratch_memory_in() -> None:
    program = program_of(lambda x, y: x.add_(y), torch.ones(64), torch.ones(64))
    launch, *others = program.launches
    assert not others
    first, second = (value.index for value in program.of_role(Role.INPUT))
    captures = [
        ModelCapture(
            [
                Task(
                    TaskType.KERNEL,
                    0xF0,
                    1,
                    0x40000,
                    struct.pack("<3Q", at, at + 512, 0x12345 * number),
                    launch.index,
                )
            ],
            {first: at, second: at + 512},
            [(0x6000_0000_0000 + (number << 32), POOL_BYTES)],
        )
        for number, at in enumerate((0x5000_0000_0000, 0x5100_0000_0200, 0x5200_0000_0600))
    ]
    found = relocated_words(program, captures)
    assert set(found.copied) == {first, second}
    assert "differs between captures" in found.why_fixed


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
