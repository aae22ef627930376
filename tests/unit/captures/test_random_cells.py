"""Random numbers in a captured graph: words that hold the generator's state, and who draws."""

from __future__ import annotations

import threading

import pytest

from offload.backends.captured.random_draws import RandomState, drawing
from offload.backends.captured.relocation.captures import RANDOM_OWNER
from offload.backends.captured.relocation.words import Discovery, NoiseKind, OwnedConstant
from offload.backends.cuda import GraphCapture, GraphNode, NodeKind
from offload.backends.cuda.random_cells import random_cells
from offload.errors import CaptureError
from offload.program import Launch, Operator, Program
from offload.program.structure import Structure

SEED, OFFSET = 0x6000_0000_0000, 0x6000_0000_0200
OTHER_SEED, OTHER_OFFSET = SEED + 0x1000, OFFSET + 0x1000
DECOY = 0x7000_0000_0000


class FakeGenerator:
    """Like a CUDA generator: it has an offset, which CPU generators do not have."""

    def __init__(self, seed: int = 7, offset: int = 0) -> None:
        self._cdata = id(self)
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


STATE = RandomState(FakeGenerator(), 4)


def program_of(*random: bool) -> Program:
    launches = tuple(
        Launch(index, Operator("aten::rand"), (), (), (), (), one, None, False, f"net.py:{index}")
        for index, one in enumerate(random)
    )
    structure = Structure("tuple")
    return Program("cuda", (), launches, (), (), structure, structure)


def capture_of(state: RandomState | None, launches=(0, 0, 0), rest=()) -> GraphCapture:
    """Nodes that hold zeros, except for (node, offset, bytes)."""
    contents = [bytearray(64), bytearray(64)]
    for node, offset, content in rest:
        contents[node][offset : offset + len(content)] = content
    nodes = [
        GraphNode(1, NodeKind.KERNEL, f"kernel{node}", (), (bytes(content),))
        for node, content in enumerate(contents)
    ]
    nodes.append(GraphNode(1, NodeKind.MEMCPY, "copy2", (), (bytes(16), bytes(64))))
    return GraphCapture(1, nodes, [], launches, [], [], None, state)


def cells(words, random=(True,), state=STATE, owner=RANDOM_OWNER, launches=(0, 0, 0), rest=()):
    """The cells of words by (node, offset, address), and the places of noise."""
    constants = tuple(
        OwnedConstant(node, 0, offset, address, owner) for node, offset, address in words
    )
    found = Discovery((), (), constants, ())
    program, capture = program_of(*random), capture_of(state, launches, rest)
    cells, noise = random_cells(program, capture, found, decoy_address=DECOY)
    assert all(one.again == DECOY.to_bytes(8, "little") for one in noise)
    assert all(one.kind is NoiseKind.CELL for one in noise)
    return cells, [(one.node, one.offset_bytes) for one in noise]


def test_words_side_by_side_are_seed_and_offset():
    words = [(1, 24, OFFSET), (1, 16, SEED), (0, 0, SEED), (0, 8, OFFSET)]
    assert cells(words) == ([([(0, 0, 0), (1, 0, 16)], [(0, 0, 8), (1, 0, 24)])], [])


def test_a_graph_that_draws_nothing_has_no_cell():
    assert cells([], random=(False,), state=None) == ([], [])
    assert cells([(0, 0, SEED)], random=(False,), state=None, owner="a library") == ([], [])
    words = [(1, 0, OFFSET), (0, 0, SEED), (0, 8, SEED)]
    assert cells(words, random=(False,), state=None) == ([], [(0, 0), (0, 8), (1, 0)])


@pytest.mark.parametrize(("words", "state"), [([], STATE), ([(0, 0, SEED), (0, 8, OFFSET)], None)])
def test_a_random_launch_whose_state_is_not_found_is_refused_with_its_line(words, state):
    with pytest.raises(CaptureError, match=r"net.py:1: aten::rand draws random numbers"):
        cells(words, random=(False, True), state=state)


def test_words_that_nobody_moves_on_are_refused():
    """No launch is known to draw, and yet a kernel reads a generator's state."""
    with pytest.raises(CaptureError, match=r"kernel1: .* each execution would draw the same"):
        cells([(1, 0, SEED), (1, 8, OFFSET)], random=(False,), state=None)
    with pytest.raises(CaptureError, match="copy2: it reads or writes the state"):
        cells([(2, 0, SEED)], random=(False,), state=None)


def test_single_words_beside_a_pair_get_the_same_cell():
    words = [(0, 0, OFFSET), (0, 32, SEED), (1, 0, SEED), (1, 8, OFFSET), (2, 8, SEED)]
    ((seeds, offsets),), noise = cells(words)
    assert seeds == [(0, 0, 32), (1, 0, 0), (2, 0, 8)]
    assert offsets == [(0, 0, 0), (1, 0, 8)]
    assert noise == []


def test_launches_that_draw_say_which_is_the_seed():
    """Stale words in another kernel may have the reverse order."""
    words = [(0, 0, OFFSET), (0, 8, SEED), (1, 0, SEED), (1, 8, OFFSET)]
    ((seeds, offsets),), noise = cells(words, random=(False, True), launches=(0, 1, 1))
    assert (seeds, offsets) == ([(0, 0, 8), (1, 0, 0)], [(0, 0, 0), (1, 0, 8)])
    assert noise == []


def test_a_single_word_of_a_generator_that_nothing_draws_from_is_noise():
    words = [(0, 0, OTHER_OFFSET), (1, 0, SEED), (1, 8, OFFSET)]
    assert cells(words) == ([([(1, 0, 0)], [(1, 0, 8)])], [(0, 0)])
    with pytest.raises(CaptureError, match="copy2: it reads or writes the state"):
        cells([*words, (2, 0, OTHER_SEED)])


@pytest.mark.parametrize(
    "words",
    [
        [(0, 0, SEED)],  # the following word belongs to something else, and must stay
        [(0, 0, SEED), (0, 16, OFFSET)],
        [(0, 0, SEED), (0, 8, OFFSET), (0, 16, SEED)],
        [(0, 0, SEED), (1, 8, OFFSET)],
        [(0, 0, SEED), (0, 8, SEED)],
        [(0, 0, SEED), (0, 8, OFFSET), (1, 0, OFFSET), (1, 8, SEED)],
    ],
)
def test_words_that_are_no_pairs_are_refused(words):
    with pytest.raises(CaptureError, match=r"kernel\d: .* side by side"):
        cells(words)


def rest_of_state(node: int, offset: int, drawn: int = 8) -> tuple[int, int, bytes]:
    """The fields after seed and offset in a PhiloxCudaState: offset_intragraph_ and captured_."""
    return node, offset, drawn.to_bytes(8, "little") + b"\1"


@pytest.mark.parametrize(
    ("words", "at", "seeds", "offsets"),
    [
        ([(0, 0, OFFSET), (0, 8, SEED), (0, 16, OFFSET)], 24, [8], [0, 16]),
        ([(0, 0, SEED), (0, 8, OFFSET), (0, 16, SEED), (0, 24, OFFSET)], 32, [0, 16], [8, 24]),
        ([(0, 0, OFFSET), (0, 8, SEED), (0, 24, SEED), (0, 32, OFFSET)], 40, [8, 24], [0, 32]),
        ([(0, 0, SEED), (0, 8, OFFSET), (0, 48, OFFSET), (0, 56, SEED)], 16, [0, 56], [8, 48]),
    ],
)
def test_what_is_left_over_beside_a_state_does_not_say_which_is_the_seed(words, at, seeds, offsets):
    """For example a stale offset just before a pair: the words after a pair identify it."""
    ((found_seeds, found_offsets),), noise = cells(words, rest=[rest_of_state(0, at)])
    assert [offset for _, _, offset in found_seeds] == seeds
    assert [offset for _, _, offset in found_offsets] == offsets
    assert noise == []


def test_a_word_of_another_generator_left_over_just_before_a_state_is_noise():
    words = [(0, 0, OTHER_OFFSET), (0, 8, SEED), (0, 16, OFFSET)]
    found, noise = cells(words, rest=[rest_of_state(0, 24)])
    assert found == [([(0, 0, 8)], [(0, 0, 16)])]
    assert noise == [(0, 0)]


@pytest.mark.parametrize(
    "rest",
    [
        (0, 24, bytes(8) + b"\0"),  # not captured
        (0, 24, (7).to_bytes(8, "little") + b"\1"),  # draws are multiples of 4
        (0, 24, (1 << 40).to_bytes(8, "little") + b"\1"),  # an address
        (0, 56, bytes(8)),  # nothing follows
    ],
)
def test_what_does_not_follow_as_in_a_state_tells_nothing(rest):
    words = [(0, 0, OFFSET), (0, 8, SEED), (0, 16, OFFSET)]
    with pytest.raises(CaptureError, match=r"kernel0: .* side by side"):
        cells(words, rest=[rest])


def test_whole_states_that_contradict_each_other_are_refused():
    words = [(0, 0, SEED), (0, 8, OFFSET), (1, 0, OFFSET), (1, 8, SEED)]
    with pytest.raises(CaptureError, match=r"kernel1: .* side by side"):
        cells(words, rest=[rest_of_state(0, 16), rest_of_state(1, 16)])
    others = [*words[:2], (1, 0, OTHER_SEED), (1, 8, OTHER_OFFSET)]
    with pytest.raises(CaptureError, match=r"kernel1: .* draw from one generator"):
        cells(others, rest=[rest_of_state(0, 16), rest_of_state(1, 16)])


@pytest.mark.parametrize("random", [(True,), (False, True)])
def test_two_generators_are_refused(random):
    """Also where only one of them belongs to a launch that is known to draw."""
    words = [(0, 0, SEED), (0, 8, OFFSET), (1, 0, OTHER_SEED), (1, 8, OTHER_OFFSET)]
    with pytest.raises(CaptureError, match=r"kernel\d: .* draw from one generator"):
        cells(words, random=random, launches=(0, len(random) - 1, 0))


def test_drawing_moves_the_generator_on():
    generator = FakeGenerator(seed=-1, offset=12)
    draw = drawing(RandomState(generator, 8))
    assert [draw(), draw()] == [[2**64 - 1, 12], [2**64 - 1, 20]]
    assert generator.offset == 28


def test_no_two_executions_draw_the_same_numbers():
    """Though called from several threads, of one executable or of several."""
    generator = FakeGenerator()

    class Slow(FakeGenerator):
        def get_offset(self) -> int:
            found = generator.offset
            threading.Event().wait(0.02)  # as if another thread had the turn
            return found

        def set_offset(self, offset: int) -> None:
            generator.offset = offset

    offsets: list[int] = []
    draws = [drawing(RandomState(Slow(), 4)) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda draw=draw: offsets.append(draw()[1])) for draw in draws
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(offsets) == [0, 4, 8, 12]
