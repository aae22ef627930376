"""One argument table for the kernels of a captured model: its blocks and its installation.

The runtime gives each kernel its own block. Where it accepts another address for a kernel's
arguments (aclmdlRITaskSetParams, aclmdlRIUpdate: CANN 9.1, software SQ), all blocks with a patched
word are copied into one table of offload's, whose addresses the kernels receive once, at load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.backends.ascend.captured_model import CapturedModel
from offload.backends.ascend.captured_tasks import ModelCapture, owner_of_arguments
from offload.backends.ascend.captured_words import RelocatedWords
from offload.backends.captured.relocation.words import WORD_BYTES, words_of
from offload.errors import BackendUnavailable, ExecutionError
from offload.native import _native
from offload.program import Program


class NoTable(Exception):
    """Why kernels keep the runtime's argument blocks.

    Attributes:
        is_spoiled: whether the runtime may have installed part of the table: the model is then
            unusable.
    """

    def __init__(self, why: str, *, is_spoiled: bool = False) -> None:
        super().__init__(why)
        self.is_spoiled = is_spoiled


@dataclasses.dataclass(frozen=True, slots=True)
class TableParts:
    """The parts of a table; blocks are those of the kernels, in their order.

    Attributes:
        kernels: (number of the task, address of the runtime's block, content).
        words: (block, offset in bytes, whether it is an input's or output's) of each patched word,
            in the discovery's order.
        own: (block, offset in bytes, byte of the block) of each word that points into its block.
    """

    kernels: Sequence[tuple[int, int, bytes]]
    words: Sequence[tuple[int, int, bool]]
    own: Sequence[tuple[int, int, int]]


def patched_tasks(words: RelocatedWords) -> list[int]:
    """Return the tasks that have a patched word, in order: these are the blocks."""
    return sorted({word.node for word in words.discovery.words})


def table_parts(
    program: Program, captures: Sequence[ModelCapture], words: RelocatedWords
) -> TableParts:
    """Return the table of the patched blocks.

    Args:
        program: the captured program.
        captures: the capture whose kernels move, and others, whose blocks lie elsewhere.
        words: of the first capture.

    Raises:
        NoTable: a block cannot move: it holds an unexplained word, or a word that may be its own
            address as it lay at one place in all captures, or another kernel holds an address in
            it.
    """
    tasks = captures[0].tasks
    moved = patched_tasks(words)
    _refuse_unexplained(words, moved)
    _refuse_foreign(captures, words, moved)
    block_of = {task: block for block, task in enumerate(moved)}
    return TableParts(
        [(tasks[node].number, tasks[node].address, tasks[node].arguments) for node in moved],
        [
            (block_of[word.node], word.offset_bytes, word.value < len(program.values))
            for word in words.discovery.words
        ],
        [
            (block_of[node], offset_bytes, target_bytes)
            for node in moved
            for offset_bytes, target_bytes in _own_addresses(captures, node)
        ],
    )


def _refuse_unexplained(words: RelocatedWords, moved: Sequence[int]) -> None:
    for one in words.discovery.unexplained:
        if one.node in set(moved):
            raise NoTable(f"it may hold an address in a block that would move: {one.why}")


def _refuse_foreign(
    captures: Sequence[ModelCapture], words: RelocatedWords, moved: Sequence[int]
) -> None:
    """Refuse addresses of a kernel in another one's block; numbers may look like addresses."""
    owners = {owner_of_arguments(node): node for node in moved}
    for one in words.discovery.constants:
        owner = owners.get(one.owner, one.node)
        values = {_word(capture, one.node, one.offset_bytes) for capture in captures}
        if owner != one.node and len(values) > 1:
            raise NoTable(
                f"task {one.node} has at byte {one.offset_bytes} of its arguments an address in "
                f"those of task {owner}"
            )


def _word(capture: ModelCapture, node: int, offset_bytes: int) -> bytes:
    return capture.tasks[node].arguments[offset_bytes : offset_bytes + WORD_BYTES]


def _own_addresses(captures: Sequence[ModelCapture], node: int) -> list[tuple[int, int]]:
    """Return (offset, byte of the block that it points to) of words that the runtime filled in.

    An address moves with its block from capture to capture; other words are numbers.
    """
    tasks = [capture.tasks[node] for capture in captures]
    found = []
    for index, values in enumerate(zip(*(words_of(task.arguments) for task in tasks), strict=True)):
        target_bytes = values[0] - tasks[0].address
        if not 0 <= target_bytes <= len(tasks[0].arguments):
            continue
        if len({task.address for task in tasks}) == 1 == len(set(values)):
            raise NoTable(
                f"task {node} had its arguments at one place in all captures, so that byte "
                f"{index * WORD_BYTES} of them may be an address in them, or a number"
            )
        targets = {value - task.address for value, task in zip(values, tasks, strict=True)}
        if targets == {target_bytes}:
            found.append((index * WORD_BYTES, target_bytes))
    return found


def install_table(device: int, model: CapturedModel, parts: TableParts) -> None:
    """Make a captured model's kernels read their arguments from a table, which the model keeps.

    Raises:
        NoTable: the runtime cannot, or refuses.
    """
    try:
        table = _native.AscendCapturedTable(
            device=device,
            model=model.handle,
            kernels=parts.kernels,
            words=parts.words,
            own=parts.own,
        )
    except (BackendUnavailable, ExecutionError) as error:
        raise NoTable(str(error)) from error
    model.table = table  # before a task reads it
    try:
        table.install(device)
    except ExecutionError as error:
        raise NoTable(str(error), is_spoiled=True) from error
