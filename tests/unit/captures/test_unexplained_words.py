"""Words without an explanation, and tasks that the runtime does not report."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from model_captures import IN, KERNELS, LAYOUTS, POOL, POOL_BYTES, SELF, captured, chain, values

import offload
from offload.backends.ascend.captured_tasks import ModelCapture, TaskType
from offload.backends.ascend.captured_words import relocated_words


def with_words(capture: ModelCapture, at: int, *words: int) -> ModelCapture:
    """The capture with other words from a byte of its first task on."""
    task = capture.tasks[0]
    content = bytearray(task.arguments)
    struct.pack_into(f"<{len(words)}Q", content, at, *words)
    first = dataclasses.replace(task, arguments=bytes(content))
    return dataclasses.replace(capture, tasks=[first, *capture.tasks[1:]])


def test_the_first_of_a_launchs_words_is_named_and_how_many_more_there_are() -> None:
    program = chain()
    kernels = [[(SELF, 40), (IN, 0), (POOL, 0), 1, 2, 7], *KERNELS[1:]]
    captures = [
        with_words(one, 24, number + 1, number + 100)
        for number, one in enumerate(captured(program, kernels))
    ]
    found = relocated_words(program, captures)
    why = found.copied[values(program)["x"]]
    assert "byte 24" in why
    assert why.endswith("(and 1 more of its words)")


def test_an_unexplained_address_of_torchs_memory_is_refused_by_what_it_is() -> None:
    """It is no constant: each capture has another one."""
    program = chain()
    kernels = [[(SELF, 32), (IN, 0), (POOL, 0), 1, 7], *KERNELS[1:]]
    captures = [
        with_words(one, 24, LAYOUTS[number][1] + 64 * (number + 1))
        for number, one in enumerate(captured(program, kernels))
    ]
    others = [(pool, POOL_BYTES) for _, pool, _ in LAYOUTS]
    with pytest.raises(offload.CaptureError, match=r"byte 24.*differs between captures"):
        relocated_words(program, captures, (), others)


@pytest.mark.parametrize("launch", [0, 2])
def test_a_launch_of_which_events_alone_are_told_is_blind(launch: int) -> None:
    """It records an event; the runtime does not report its other work."""
    program = chain()
    found = relocated_words(
        program, captured(program, KERNELS, types={launch: TaskType.EVENT_RECORD})
    )
    names = values(program)
    (value,) = found.copied
    assert value == (names["x"] if launch == 0 else names["out"])
    assert "the runtime reports no task of" in found.copied[value]
    assert "the runtime reports no task of" in found.why_fixed


@pytest.mark.parametrize("part", ["words", "copied", "why_fixed"])
def test_another_choice_is_another_in_each_part(part: str) -> None:
    program = chain()
    found = relocated_words(program, captured(program, KERNELS))
    assert found.same_choice(found)
    other = {
        "words": dataclasses.replace(
            found, discovery=dataclasses.replace(found.discovery, words=found.discovery.words[1:])
        ),
        "copied": dataclasses.replace(found, copied={0: "another kernel"}),
        "why_fixed": dataclasses.replace(found, why_fixed="scratch memory"),
    }[part]
    assert not found.same_choice(other)
    assert not other.same_choice(found)
