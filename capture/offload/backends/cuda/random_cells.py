"""Random numbers in a graph: the words through which kernels find a generator's state."""

from __future__ import annotations

from collections.abc import Callable

from offload.backends.cuda.capture import RANDOM_OWNER, GraphCapture, RandomState
from offload.backends.cuda.words import Discovery
from offload.errors import CaptureError
from offload.program import Program

_WORD_BYTES = 8

NodeWord = tuple[int, int, int]
"""(node, part, offset in bytes)."""

Cell = tuple[list[NodeWord], list[NodeWord]]
"""The words that hold the address of a seed, and those that hold that of an offset."""


def random_cells(program: Program, capture: GraphCapture, discovery: Discovery) -> list[Cell]:
    """One cell for the generator that the graph draws from; none if it draws no random numbers.

    Seed and offset stand side by side in a kernel's arguments: see GraphCapture.random.

    Raises:
        CaptureError: random launches draw from memory that the capturer did not name, from several
            generators, or find their state in another way than side by side.
    """
    found = {
        (one.node, one.part, one.offset_bytes): one.address
        for one in discovery.constants
        if one.owner == RANDOM_OWNER
    }
    random = next((launch for launch in program.launches if launch.random), None)
    if random is not None and (capture.random is None or not found):
        raise CaptureError(
            f"{random.source}: {random.operator} draws random numbers, and where its kernels find "
            "the generator's state is not known here, so that each execution would draw the same"
        )
    seeds, offsets, pairs = [], [], set()
    remaining = dict(sorted(found.items()))
    while remaining:
        (node, part, offset_bytes), seed = next(iter(remaining.items()))
        after = (node, part, offset_bytes + _WORD_BYTES)
        del remaining[node, part, offset_bytes]
        pairs.add((seed, remaining.pop(after, None)))
        seeds.append((node, part, offset_bytes))
        offsets.append(after)
    if len(pairs) > 1:
        where = capture.nodes[seeds[-1][0]].name
        raise CaptureError(
            f"{where}: it finds the state of a random generator elsewhere than the kernels before "
            "it; draw from one generator, torch's default one or one that is passed"
        )
    return [(seeds, offsets)] if seeds else []


def drawing(state: RandomState) -> Callable[[], list[int]]:
    """What gives each execution the generator's seed and offset, and moves it on as eager does."""

    def draw() -> list[int]:
        generator = state.generator
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + state.increment)
        return [seed % 2**64, offset]

    return draw
