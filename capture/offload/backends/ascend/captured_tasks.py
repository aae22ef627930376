"""A captured model's tasks as data, and as nodes of a graph for discovery."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from offload.backends.captured.relocation.captures import (
    RANDOM_OWNER,
    Allocation,
    GraphCapture,
    GraphNode,
    NodeKind,
    OwnedRange,
)
from offload.backends.captured.relocation.words import WORD_BYTES
from offload.program import Program, Role


class TaskType(enum.IntEnum):
    """The kind of a model's task: aclmdlRITaskType, in the runtime's numbers."""

    DEFAULT = 0
    KERNEL = 1
    EVENT_RECORD = 2
    EVENT_WAIT = 3
    EVENT_RESET = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One task of a captured model.

    Attributes:
        type: one of TaskType, or another number of the runtime; only kernels have the other fields.
        function, n_blocks: the kernel, and its number of blocks on the device.
        address: the address of the argument block, for the model's lifetime.
        arguments: the content of the block.
        launch: the launch of the Program that made it.
        number: its number among all tasks of the model, in the runtime's order.
    """

    type: int
    function: int
    n_blocks: int
    address: int
    arguments: bytes
    launch: int
    number: int = 0

    @property
    def is_kernel(self) -> bool:
        """Whether its arguments can be read."""
        return self.type == TaskType.KERNEL

    @property
    def is_blind(self) -> bool:
        """Whether it may access memory that the runtime does not report: copies, memsets, AI CPU.

        The runtime does not report some tasks at all: a launch without tasks is blind.
        """
        return self.type == TaskType.DEFAULT or self.type > TaskType.EVENT_RESET


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCapture:
    """One capture of a Program's launches by torch, as data.

    Attributes:
        tasks: the launches' tasks, in order.
        places: by Value the address of each input's memory, and of each launch's results.
        pool: (address, bytes) of each piece of the pool, in the order of their allocation by torch.
        cells: the addresses of each generator's seed and offset, which do not move.
    """

    tasks: Sequence[Task]
    places: Mapping[int, int]
    pool: Sequence[tuple[int, int]]
    cells: Sequence[tuple[int, int]] = ()


def inputs_of(program: Program, capture: ModelCapture) -> list[int]:
    """Return the inputs that have memory in a capture, in the order of their allocations."""
    return [value.index for value in program.of_role(Role.INPUT) if value.index in capture.places]


def owner_of_arguments(number: int) -> str:
    """Name the owner of a task's argument block, by its place among those of a capture."""
    return f"arguments of task {number}"


def as_graph(
    program: Program, capture: ModelCapture, weights: Sequence[OwnedRange]
) -> GraphCapture:
    """Return the tasks as nodes; an allocation's Value is its number: inputs, then pieces.

    Words that point into an argument block, written by the runtime, have an owner that the model
    keeps (class self), as have words that point to a cell of the capture, from which kernels read a
    seed or an offset: they are distinguished from other addresses, and never patched.
    """
    ranges = [
        *(
            (capture.places[index], program.values[index].size_bytes)
            for index in inputs_of(program, capture)
        ),
        *capture.pool,
    ]
    return GraphCapture(
        graph=0,
        nodes=[
            GraphNode(
                handle=task.address,
                kind=NodeKind.KERNEL if task.is_kernel else NodeKind.EMPTY,
                name=f"function 0x{task.function:x}" if task.is_kernel else f"type {task.type}",
                signature=(task.type, task.function, task.n_blocks),
                parts=(task.arguments,),
            )
            for task in capture.tasks
        ],
        edges=(),
        launches=[task.launch for task in capture.tasks],
        allocations=[
            Allocation(address, size_bytes, number)
            for number, (address, size_bytes) in enumerate(ranges)
        ],
        owned=[
            *(
                OwnedRange(task.address, len(task.arguments), owner_of_arguments(number))
                for number, task in enumerate(capture.tasks)
                if task.arguments
            ),
            *(
                OwnedRange(address, WORD_BYTES, f"{RANDOM_OWNER}: {what} of generator {number}")
                for number, cell in enumerate(capture.cells)
                for what, address in zip(("seed", "offset"), cell, strict=True)
            ),
            *weights,
        ],
        keep=None,
    )
