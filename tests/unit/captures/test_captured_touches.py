"""What launches of a captured Ascend model touch that no word names: it is copied, or stays."""

from __future__ import annotations

import dataclasses
import re
import struct

import pytest
import torch
from model_captures import (
    BLOCK_BYTES,
    IN,
    KERNELS,
    LAYOUTS,
    LOOK_ALIKE,
    OUT,
    POOL,
    POOL_BYTES,
    SELF,
    Word,
    captured,
    chain,
    program_of,
    values,
    words_of,
)

from offload.backends.ascend.captured_tasks import ModelCapture, Task, TaskType
from offload.backends.ascend.captured_words import relocated_words
from offload.program import Role


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
