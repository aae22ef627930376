"""Hand-made captures of an Ascend model: tasks, and the words of their argument blocks."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

import offload
from offload.backends.ascend.captured_tasks import ModelCapture, Task, TaskType
from offload.backends.ascend.captured_words import RelocatedWords
from offload.program import Program, Role

POOL_BYTES = 1 << 21
BLOCK_BYTES = 256
LOOK_ALIKE = 0x7F00_0000_0040

# By capture: the addresses of a generator's seed and offset.
CELLS = [(0x3000_0000_0000, 0x3000_0000_0200), (0x3100_0000_0200, 0x3100_0000_0000)] * 2

# By capture: the addresses of the input, the pool and the argument blocks.
LAYOUTS = [
    (0x5000_0000_0000, 0x6000_0000_0000, 0x4000_0000_0000),
    (0x5100_0000_0200, 0x6300_0040_0000, 0x4000_0000_0000),  # blocks that are reused
    (0x5200_0000_0600, 0x6200_0020_0000, 0x4010_0000_4000),
]

IN, OUT, POOL, SELF, SEED, OFFSET = "input", "output", "pool", "self", "seed", "offset"
Word = int | tuple[str, int]


def program_of(function, *inputs: torch.Tensor) -> Program:
    return offload.capture(function, *inputs).program


def chain() -> Program:
    """Three launches: two activations, then the output, which may take the first one's place."""
    return program_of(lambda x: ((x + 1) * 2).relu(), torch.ones(64))


def values(program: Program) -> dict[str, int]:
    (x,) = program.of_role(Role.INPUT)
    (out,) = program.of_role(Role.OUTPUT)
    first, second = program.of_role(Role.ACTIVATION)
    return {"x": x.index, "out": out.index, "first": first.index, "second": second.index}


# Where torch places the Values of the chain: the output takes the place of the first activation.
PLACES = {"first": 0, "second": 512, "out": 0}


def captured(
    program: Program,
    kernels: Sequence[Sequence[Word]],
    *,
    launches: Sequence[int] | None = None,
    types: Mapping[int, int] = {},
    layouts: Sequence[tuple[int, int, int]] = LAYOUTS,
    places: Mapping[str, int] = PLACES,
    noise: Mapping[int, tuple[int, int]] = {},
) -> list[ModelCapture]:
    """Three captures of kernels with these words; `noise`: by capture a word of a task."""
    found = []
    for number, (at, pool, blocks) in enumerate(layouts):
        bases = {IN: at, POOL: pool, OUT: pool + places["out"]}
        bases |= dict(zip((SEED, OFFSET), CELLS[number], strict=True))
        tasks = []
        for index, words in enumerate(kernels):
            address = blocks + BLOCK_BYTES * index
            content = [
                word if isinstance(word, int) else {**bases, SELF: address}[word[0]] + word[1]
                for word in words
            ]
            if number in noise and noise[number][0] == index:
                content.append(noise[number][1])
            elif noise and noise[min(noise)][0] == index:
                content.append(0)
            tasks.append(
                Task(
                    types.get(index, TaskType.KERNEL),
                    0xF0 + index,
                    1,
                    address,
                    struct.pack(f"<{len(content)}Q", *content),
                    index if launches is None else launches[index],
                )
            )
        names = values(program)
        where = {names["x"]: at}
        where |= {names[name]: pool + offset for name, offset in places.items()}
        found.append(ModelCapture(tasks, where, [(pool, POOL_BYTES)], [CELLS[number]]))
    return found


# Arguments of the chain's kernels: the address of tiling data, input, output, then the data.
KERNELS: list[list[Word]] = [
    [(SELF, 24), (IN, 0), (POOL, 0), LOOK_ALIKE],
    [(SELF, 24), (POOL, 0), (POOL, 512), LOOK_ALIKE],
    [(SELF, 24), (POOL, 512), (OUT, 0), LOOK_ALIKE],
]


def words_of(program: Program, found: RelocatedWords) -> set[tuple[int, int, str, int]]:
    """(task, byte, Value's name, offset) of each word."""
    names = {index: name for name, index in values(program).items()}
    names[len(program.values)] = POOL
    return {
        (word.node, word.offset_bytes, names[word.value], word.value_offset_bytes)
        for word in found.discovery.words
    }
