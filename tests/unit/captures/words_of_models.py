"""Words that move in a made-up capture of an Ascend model."""

from __future__ import annotations

from model_captures import (
    POOL,
    values,
)

from offload.backends.ascend.captured_words import RelocatedWords
from offload.program import Program


def words_of(program: Program, found: RelocatedWords) -> set[tuple[int, int, str, int]]:
    """(task, byte, Value's name, offset) of each word."""
    names = {index: name for name, index in values(program).items()}
    names[len(program.values)] = POOL
    return {
        (word.node, word.offset_bytes, names[word.value], word.value_offset_bytes)
        for word in found.discovery.words
    }
