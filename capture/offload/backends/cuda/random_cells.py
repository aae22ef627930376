"""Random numbers in a graph: the words through which kernels find a generator's state."""

from __future__ import annotations

from collections.abc import Mapping

from offload.backends.relocation.captures import RANDOM_OWNER, GraphCapture
from offload.backends.relocation.words import WORD_BYTES, Discovery
from offload.errors import CaptureError
from offload.program import Program

NodeWord = tuple[int, int, int]
"""(node, part, offset in bytes)."""

Cell = tuple[list[NodeWord], list[NodeWord]]
"""The words that hold the address of a seed, and those that hold that of an offset."""


_DRAW_BEFORE = (
    "draw outside of the captured model and pass the numbers as an input, or leave the operator out"
)


def random_cells(program: Program, capture: GraphCapture, discovery: Discovery) -> list[Cell]:
    """One cell for the generator that the graph draws from; none if it draws no random numbers.

    Seed and offset stand side by side in a kernel's arguments: see GraphCapture.random.

    Raises:
        CaptureError: random launches draw from memory that the capturer did not name, kernels from
            memory that nobody moves on, from several generators, or they find their state in
            another way than side by side.
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
            "the generator's state is not known here, so that each execution would draw the same; "
            f"{_DRAW_BEFORE}"
        )
    pairs = _pairs(capture, found)
    if not pairs:
        return []
    first, first_state = pairs[0]
    if capture.random is None:
        raise CaptureError(
            f"{_name(capture, first)}: it reads the state of a random generator that no launch is "
            f"known to draw from, so that each execution would draw the same; {_DRAW_BEFORE}"
        )
    for word, state in pairs:
        if state != first_state:
            raise CaptureError(
                f"{_name(capture, word)}: it finds the state of a random generator elsewhere than "
                "the kernels before it; draw from one generator, torch's default one or one that "
                "is passed"
            )
    seeds = [word for word, _ in pairs]
    return [(seeds, [_after(word) for word in seeds])]


def _pairs(
    capture: GraphCapture, found: Mapping[NodeWord, int]
) -> list[tuple[NodeWord, tuple[int, int]]]:
    """The words that hold the address of a seed, and the addresses of seed and offset there.

    Raises:
        CaptureError: a word has no other one beside it.
    """
    pairs = []
    remaining = dict(sorted(found.items()))
    while remaining:
        word = next(iter(remaining))
        seed, offset = remaining.pop(word), remaining.pop(_after(word), None)
        if offset is None or offset == seed:
            raise CaptureError(
                f"{_name(capture, word)}: the addresses of a random generator's seed and offset do "
                f"not stand side by side at byte {word[2]} of its arguments, so that they cannot "
                f"be told apart; {_DRAW_BEFORE}"
            )
        pairs.append((word, (seed, offset)))
    return pairs


def _after(word: NodeWord) -> NodeWord:
    node, part, offset_bytes = word
    return node, part, offset_bytes + WORD_BYTES


def _name(capture: GraphCapture, word: NodeWord) -> str:
    return capture.nodes[word[0]].name
