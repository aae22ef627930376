"""Random numbers in a graph: the words by which kernels find a generator's state."""

from __future__ import annotations

from collections.abc import Mapping

from offload.backends.captured.relocation.captures import RANDOM_OWNER, GraphCapture, NodeKind
from offload.backends.captured.relocation.words import WORD_BYTES, Discovery, Noise, NoiseKind
from offload.errors import CaptureError
from offload.program import Program

NodeWord = tuple[int, int, int]
"""(node, part, offset in bytes)."""

Cell = tuple[list[NodeWord], list[NodeWord]]
"""The words that hold the address of the seed, and those that hold that of the offset."""

_MOST_DRAWN = 1 << 40  # by one execution of a graph, which advances a generator by less

_DRAW_BEFORE = (
    "draw outside of the captured model and pass the numbers as an input, or leave the operator out"
)


def random_cells(
    program: Program, capture: GraphCapture, discovery: Discovery, *, decoy_address: int
) -> tuple[list[Cell], list[Noise]]:
    """The cell of the generator that the graph draws from; empty if it draws no random numbers.

    Drawing kernels find the addresses of seed and offset side by side in their arguments (see
    GraphCapture.random). A single word that holds one of the two may be a remainder of kernels that
    drew, or of those by which torch 2.11 fills the cells, the last kernels before a capture (see
    generator_cells.py). It also gets the address of the executable's cell, whether it is read or
    not. If nothing is drawn, or not from there, it is noise, which the proof changes.

    Args:
        program: the captured Program.
        capture: its template.
        discovery: of its words.
        decoy_address: replaces such noise in the proof.

    Raises:
        CaptureError: random launches draw from memory that the capturer did not name, kernels draw
            from memory that nothing advances, from several generators, or find their state in
            another form than side by side.
    """
    found = {
        (one.node, one.part, one.offset_bytes): one.address
        for one in discovery.constants
        if one.owner == RANDOM_OWNER
    }
    random = next((launch for launch in program.launches if launch.random), None)
    if random is not None and (capture.random is None or not found):
        raise CaptureError(
            f"{random.source}: {random.name} draws random numbers, and where its kernels read the "
            "generator's state is not known, so each execution would draw the same numbers; "
            f"{_DRAW_BEFORE}"
        )
    pairs = _pairs(found)
    if capture.random is None:  # no generator advanced in the warm-up
        if pairs:
            raise CaptureError(
                f"{_name(capture, min(pairs))}: it reads the state of a random generator that no "
                "launch is known to draw from, so each execution would draw the same numbers; "
                f"{_DRAW_BEFORE}"
            )
        return [], _noise(capture, found, decoy_address)
    if not found:
        return [], []
    seed, offset = _state(program, capture, found, pairs)
    seeds = [word for word, address in sorted(found.items()) if address == seed]
    offsets = [word for word, address in sorted(found.items()) if address == offset]
    others = {word: address for word, address in found.items() if address not in (seed, offset)}
    return [(seeds, offsets)], _noise(capture, others, decoy_address)


def _pairs(found: Mapping[NodeWord, int]) -> dict[NodeWord, tuple[int, int]]:
    """By the first of two adjacent words that differ: both addresses."""
    return {
        word: (address, found[_beside(word, 1)])
        for word, address in sorted(found.items())
        if found.get(_beside(word, 1), address) != address
    }


def _state(
    program: Program,
    capture: GraphCapture,
    found: Mapping[NodeWord, int],
    pairs: Mapping[NodeWord, tuple[int, int]],
) -> tuple[int, int]:
    """The addresses of seed and offset, from the kernels of drawing launches.

    If no launch is known to draw, as in an opaque Program, all kernels count. Pairs that are part
    of a PhiloxCudaState determine which is which; a pair that shares a word with one of them is a
    remainder. Without such a pair, every pair counts.

    Raises:
        CaptureError: no word has an adjacent one, or pairs name several states.
    """
    drawing = {launch.index for launch in program.launches if launch.random}
    draws = {word for word in found if not drawing or capture.launches[word[0]] in drawing}
    whole = {word for word in pairs if _is_philox_state(capture, found, word)}
    left_over = {place for word in whole for place in (_beside(word, -1), _beside(word, 1))}
    says = [word for word in pairs if word in draws & whole]
    says = says or [word for word in pairs if word in draws]
    if not says:
        raise _unpaired(capture, min(draws or found))
    state = pairs[says[0]]
    for word, other in pairs.items():
        if set(other) != set(state) and word not in left_over:
            raise CaptureError(
                f"{_name(capture, word)}: it reads the state of a random generator at another "
                "address than the kernels before it; draw from one generator, torch's default one "
                "or one that is passed"
            )
        if other != state and word in says:  # which is the seed?
            raise _unpaired(capture, word)
    return state


def _is_philox_state(capture: GraphCapture, found: Mapping[NodeWord, int], word: NodeWord) -> bool:
    """Whether a pair is followed by the rest of torch's PhiloxCudaState.

    That is the offset within the graph, in 64 bits, a multiple of 4, and a byte that says that the
    graph was captured (PhiloxCudaStateRaw.cuh of torch 2.11 to 2.14; CUDAGeneratorState::increase).
    """
    node, part, offset_bytes = word
    begin = offset_bytes + 2 * WORD_BYTES
    rest = capture.nodes[node].parts[part][begin : begin + WORD_BYTES + 1]
    if len(rest) <= WORD_BYTES or (node, part, begin) in found:
        return False
    drawn = int.from_bytes(rest[:WORD_BYTES], "little")
    return drawn < _MOST_DRAWN and drawn % 4 == 0 and rest[WORD_BYTES] == 1


def _unpaired(capture: GraphCapture, word: NodeWord) -> CaptureError:
    return CaptureError(
        f"{_name(capture, word)}: the addresses of a random generator's seed and offset are not "
        f"side by side and in the same order everywhere, at byte {word[2]} of its arguments, so "
        f"they cannot be distinguished; {_DRAW_BEFORE}"
    )


def _noise(capture: GraphCapture, found: Mapping[NodeWord, int], decoy_address: int) -> list[Noise]:
    """Words that no kernel should read; copies, memsets and host tables read all their bytes.

    Raises:
        CaptureError: such a word is in one of the latter.
    """
    for word in found:
        if word[1] or capture.nodes[word[0]].kind is not NodeKind.KERNEL:
            raise CaptureError(
                f"{_name(capture, word)}: it reads or writes the state of a random generator that "
                f"no launch is known to draw from; {_DRAW_BEFORE}"
            )
    decoy = decoy_address.to_bytes(WORD_BYTES, "little")
    return [
        Noise(*word, address.to_bytes(WORD_BYTES, "little"), decoy, NoiseKind.CELL)
        for word, address in sorted(found.items())
    ]


def _beside(word: NodeWord, n_words: int) -> NodeWord:
    node, part, offset_bytes = word
    return node, part, offset_bytes + n_words * WORD_BYTES


def _name(capture: GraphCapture, word: NodeWord) -> str:
    return capture.nodes[word[0]].name
