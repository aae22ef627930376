"""The proof at load, on a resident written in Python whose memory is the host's."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import pytest
import torch

from offload.backends.captured.relocation.proof import apart, prove
from offload.backends.captured.relocation.proof_bases import Placed
from offload.backends.captured.relocation.words import Noise
from offload.errors import CaptureError
from offload.plan import Lifetime, Place, Plan, place_values
from offload.plan.topology import CostTable, Machine
from offload.program import (
    Bindings,
    BoundProgram,
    Launch,
    Operator,
    Overlap,
    Program,
    Result,
    Role,
    TensorView,
    Value,
)
from offload.program.structure import Structure

IN, ACT, OUT, WEIGHT = Role.INPUT, Role.ACTIVATION, Role.OUTPUT, Role.WEIGHT
MACHINE = Machine("cuda", "test", 0, 256, CostTable())
N_BYTES = 64


class HostMemory:
    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}

    def allocate(self, size_bytes: int) -> int:
        block = ctypes.create_string_buffer(max(size_bytes, 1))
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.blocks[address]

    def fill(self, address: int, size_bytes: int) -> None:
        ctypes.memset(address, 0, size_bytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def read(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)


class MixingResident:
    """Each node mixes its sources and its number byte by byte into its destination.

    `frozen` words keep the first address that they are given.
    """

    def __init__(self, nodes: Sequence[tuple[Sequence[int], int]], frozen: Sequence[int] = ()):
        self.nodes = nodes
        self.frozen = frozen
        self.words: dict[int, int] = {}
        self.noise: dict[tuple[int, int, int], bytes] = {}
        self.n_executions = 0

    def overwrite(self, word: tuple[int, int, int], content: bytes) -> None:
        self.noise[word] = content

    def patch(self, patches: list[tuple[int, int]]) -> None:
        for word, address in patches:
            if word not in self.frozen or word not in self.words:
                self.words[word] = address

    def execute(self) -> None:
        for number, (sources, destination) in enumerate(self.nodes):
            mixed = [number + 1] * N_BYTES
            for source in sources:
                content = ctypes.string_at(self.words[source], N_BYTES)
                mixed = [(3 * one + other) % 256 for one, other in zip(mixed, content, strict=True)]
            ctypes.memmove(self.words[destination], bytes(mixed), N_BYTES)
        self.n_executions += 1

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def make_bound(roles: Sequence[Role], dtype: str = "float32", **changes: object) -> BoundProgram:
    items = {"float32": 16, "int64": 8}[dtype]
    values = tuple(
        Value(index, role, (items,), (1,), dtype, N_BYTES, f"{role}{index}")
        for index, role in enumerate(roles)
    )
    views = [TensorView(one.index, 0, one.shape, one.strides, dtype) for one in values]
    launches = tuple(
        Launch(
            index, Operator("sim::xor"), (), (), (one.index,), (one.index,), False, None, False, ""
        )
        for index, one in enumerate(values)
        if one.role is not IN
    )
    fields = {
        "device": "cuda",
        "values": values,
        "launches": launches,
        "inputs": tuple(views[one.index] for one in values if one.role is IN),
        "results": tuple(Result(views[one.index]) for one in values if one.role is OUT),
        "arguments_structure": Structure("tuple"),
        "result_structure": Structure("tuple"),
    }
    live = {name: changes.pop(name) for name in ("weights", "input_samples") if name in changes}
    return BoundProgram(Program(**{**fields, **changes}), Bindings(**live))


# input 0 -> activation 1 -> activation 2 -> output 3, which reads activation 1 as well
ROLES = (IN, ACT, ACT, OUT)
WORDS = (0, 1, 1, 2, 1, 2, 3)  # the Value of each word
NODES = (((0,), 1), ((2,), 3), ((4, 5), 6))
LIFETIMES = (Lifetime(0, 3), Lifetime(0, 3), Lifetime(1, 3), Lifetime(0, 3))


def placed(plan: Plan, resident: MixingResident, words=WORDS) -> Placed:
    relocations = [
        (word, plan.places[value].slot, plan.places[value].offset_bytes)
        for word, value in enumerate(words)
    ]
    return Placed(plan, resident, relocations)


def run_proof(
    bound: BoundProgram,
    loaded: MixingResident,
    lifetimes=LIFETIMES,
    words=WORDS,
    plan=None,
    noise=(),
) -> HostMemory:
    plan = plan or place_values(bound.program, MACHINE, lifetimes=lifetimes)
    unshared = apart(bound.program, plan)
    memory = HostMemory()
    prove(
        bound,
        placed(plan, loaded, words),
        placed(unshared, MixingResident(loaded.nodes), words),
        memory,
        noise=noise,
        describe=lambda one: f"kernel {one.node} word {one.offset_bytes}",
    )
    return memory


def test_a_resident_that_follows_its_words_is_proved_and_leaves_no_memory():
    resident = MixingResident(NODES)
    memory = run_proof(make_bound(ROLES), resident)
    assert resident.n_executions == 2
    assert memory.blocks == {}


def test_the_plan_apart_shares_nothing():
    bound = make_bound(ROLES)
    plan = place_values(bound.program, MACHINE, lifetimes=[Lifetime(0, 1), Lifetime(0, 1)] * 2)
    shared = apart(bound.program, plan)
    assert [place.offset_bytes for place in shared.places] == [0, 0, 256, 0]
    assert shared.feature_map_bytes == shared.feature_map.size_bytes == 512


@pytest.mark.parametrize("word", [0, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_word_that_reads_at_its_old_address_is_found(word, dtype):
    with pytest.raises(
        CaptureError,
        match=r"another result at other addresses: output3 .* leave that out; load\(verify=False\)",
    ):
        run_proof(make_bound(ROLES, dtype), MixingResident(NODES, frozen=[word]))


@pytest.mark.parametrize("word", [1, 3, 6])
def test_a_word_that_writes_at_its_old_address_is_found(word):
    with pytest.raises(CaptureError, match=r"another result|old addresses"):
        run_proof(make_bound(ROLES), MixingResident(NODES, frozen=[word]))


SAMPLES = {
    "fractions": torch.arange(16) / 7,
    "zeros": torch.zeros(16),
    "ones": torch.ones(16),
    "indices": torch.arange(8),
    "no index but 0": torch.zeros(8, dtype=torch.int64),
}


@pytest.mark.parametrize("word", range(7))
@pytest.mark.parametrize("name", SAMPLES)
def test_a_missed_word_is_found_on_the_recorded_input_too(name, word):
    """It is the only one that executes, so that old memory is cleared for it."""
    sample = SAMPLES[name]
    bound = make_bound(
        ROLES, str(sample.dtype).removeprefix("torch."), input_samples=(sample.numpy().tobytes(),)
    )
    assert run_proof(bound, MixingResident(NODES)).blocks == {}
    with pytest.raises(CaptureError, match=r"another result|old addresses"):
        run_proof(bound, MixingResident(NODES, frozen=[word]))


@pytest.mark.parametrize("word", range(7))
def test_a_missed_word_is_found_where_one_input_alone_is_made_up(word):
    """What depends on the other alone holds the expected bits after any execution."""
    nodes = (((0,), 1), ((2,), 3), ((4, 5), 6))
    samples = (torch.arange(16) / 7, torch.zeros(16))
    bound = make_bound(
        (IN, IN, ACT, ACT, OUT), input_samples=tuple(one.numpy().tobytes() for one in samples)
    )
    more = {"lifetimes": [Lifetime(0, 3)] * 5, "words": (0, 2, 2, 3, 3, 1, 4)}
    assert run_proof(bound, MixingResident(nodes), **more).blocks == {}
    with pytest.raises(CaptureError, match=r"another result|old addresses"):
        run_proof(bound, MixingResident(nodes, frozen=[word]), **more)


@pytest.mark.parametrize("tile_bytes", [N_BYTES // 2, N_BYTES])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_missed_word_of_an_output_is_found_where_all_results_are_zero(
    monkeypatch, dtype, tile_bytes
):
    """As they are where a threshold is above all numbers that are made up for zeros."""
    monkeypatch.setattr("offload.backends.captured.relocation.proof_bases._TILE_BYTES", tile_bytes)

    class Below(MixingResident):
        def execute(self) -> None:
            for _, destination in self.nodes:
                ctypes.memset(self.words[destination], 0, N_BYTES)

    samples = (bytes(N_BYTES),)
    bound = make_bound(ROLES, dtype, input_samples=samples)
    plan = place_values(bound.program, MACHINE, lifetimes=LIFETIMES)

    def run(frozen: Sequence[int]) -> None:
        loaded = placed(plan, Below(NODES, frozen))
        unshared = apart(bound.program, plan)
        prove(bound, loaded, placed(unshared, Below(NODES)), HostMemory())

    run([])
    with pytest.raises(CaptureError, match="another result at other addresses: output3"):
        run([6])


def test_writing_to_an_old_address_is_found_where_the_result_is_right():
    also = (*NODES, ((4,), 7))  # a second store of what nobody reads
    words = (*WORDS, 2)
    with pytest.raises(
        CaptureError,
        match=r"old addresses, in feature map .*from byte .* on: expected the same bits, .*leave",
    ):
        run_proof(make_bound(ROLES), MixingResident(also, frozen=[7]), words=words)


def test_where_results_are_constant_a_write_to_an_old_activation_is_found():
    """Nothing that is patched shows in a result; the old memory holds other data all the same."""

    class Constant(MixingResident):
        def execute(self) -> None:
            super().execute()
            ctypes.memset(self.words[6], 0, N_BYTES)

    bound = make_bound(ROLES)
    plan = place_values(bound.program, MACHINE, lifetimes=LIFETIMES)

    def run(frozen: Sequence[int]) -> None:
        loaded = placed(plan, Constant(NODES, frozen))
        unshared = apart(bound.program, plan)
        prove(bound, loaded, placed(unshared, Constant(NODES)), HostMemory())

    run([])
    for word in (1, 3):
        with pytest.raises(CaptureError, match="still writes to its old addresses, in feature map"):
            run([word])


def test_the_memory_of_the_capture_is_changed_before_every_slot_has_moved():
    """So that what no word holds shows: once, when two executions have been made."""
    resident, at = MixingResident(NODES), []
    bound = make_bound(ROLES)
    plan = place_values(bound.program, MACHINE, lifetimes=LIFETIMES)
    unshared = MixingResident(NODES)
    prove(
        bound,
        placed(plan, resident),
        placed(apart(bound.program, plan), unshared),
        HostMemory(),
        before_moved=lambda: at.append((unshared.n_executions, resident.n_executions)),
    )
    assert at == [(1, 1)]
    assert resident.n_executions == 2


@pytest.mark.parametrize("weight_is_written", [False, True])
def test_a_graph_that_computes_other_bits_each_time_is_told_from_one_that_cannot_move(
    weight_is_written,
):
    """As additions in any order do: the proof can say nothing of it, and says that."""

    class Unsteady(MixingResident):
        def execute(self) -> None:
            super().execute()
            last = self.words[6]
            ctypes.memset(last, self.n_executions, 1)

    bound, words, nodes = make_bound(ROLES), WORDS, NODES
    if weight_is_written:
        bound = make_bound((*ROLES, WEIGHT), weights={4: (torch.arange(16.0),)})
        words, nodes = (*WORDS, 4, 4), (*NODES, ((7,), 8))
    lifetimes = (*LIFETIMES, Lifetime(0, 3))[: len(bound.program.values)]
    with pytest.raises(
        CaptureError,
        match=r"other bits each time.*use_deterministic_algorithms\(True\).* load\(verify=False\)",
    ):
        run_proof(bound, Unsteady(nodes), lifetimes=lifetimes, words=words)
    with pytest.raises(CaptureError, match="another result at other addresses"):
        run_proof(bound, MixingResident(nodes, frozen=[0]), lifetimes=lifetimes, words=words)


@pytest.mark.parametrize("word", [1, 2, 4])
def test_executions_before_the_move_draw_other_random_numbers(word):
    """Else what a missed word reads or overwrites would be what is there anyway."""

    class Drawing(MixingResident):
        state = 0

        def draw(self, state: int) -> None:
            self.state = state

        def execute(self) -> None:
            ctypes.memset(self.words[1], 1 + self.state, N_BYTES)  # reads no input
            super().execute()

    def run(frozen: Sequence[int], *, draws: bool = True) -> None:
        bound = make_bound(ROLES)
        plan = place_values(bound.program, MACHINE, lifetimes=LIFETIMES)
        residents = [Drawing(NODES[1:], frozen), Drawing(NODES[1:])]
        plans = (plan, apart(bound.program, plan))
        loaded, unshared = (
            dataclasses.replace(placed(its_plan, one), **({"draw": one.draw} if draws else {}))
            for its_plan, one in zip(plans, residents, strict=True)
        )
        prove(bound, loaded, unshared, HostMemory())

    run([])
    run([word], draws=False)
    with pytest.raises(CaptureError, match=r"another result|old addresses"):
        run([word])


def test_lifetimes_that_are_too_short_are_found():
    short = (Lifetime(0, 3), Lifetime(0, 1), Lifetime(1, 3), Lifetime(0, 3))
    with pytest.raises(CaptureError, match="another result"):
        run_proof(make_bound(ROLES), MixingResident(NODES), lifetimes=short)


def test_what_is_written_is_a_copy():
    """An input and a weight that are written are compared too, and stay as they are."""
    weight = torch.arange(16.0)
    before = weight.clone()
    roles = (IN, WEIGHT, ACT, OUT)
    nodes = (((0, 1), 2), ((3,), 4), ((5,), 6), ((7,), 8))
    words = (0, 1, 2, 2, 1, 1, 3, 1, 0)  # act of in and weight; then weight, out and in are written
    bound = make_bound(roles, weights={1: (weight,)})
    run_proof(bound, MixingResident(nodes), words=words)
    assert torch.equal(weight, before)
    with pytest.raises(CaptureError, match=r"weight1|input0|output3"):
        run_proof(bound, MixingResident(nodes, frozen=[4]), words=words)
    assert torch.equal(weight, before)


def test_inputs_that_overlap_are_placed_as_they_were():
    roles = (IN, IN, OUT)
    bound = make_bound(roles, overlaps=(Overlap(0, 1, -16),))
    seen: list[int] = []

    class Watching(MixingResident):
        def execute(self) -> None:
            seen.append(self.words[1] - self.words[0])
            super().execute()

    run_proof(bound, Watching((((0, 1), 2),)), lifetimes=(Lifetime(0, 1),) * 3, words=(0, 1, 2))
    assert seen == [-16, -16]


def test_a_plan_in_which_a_value_has_no_place_is_fine():
    bound = make_bound((*ROLES, ACT))
    plan = place_values(bound.program, MACHINE, lifetimes=(*LIFETIMES, Lifetime(0, 0)))
    assert plan.places[4] is None
    assert run_proof(bound, MixingResident(NODES), plan=plan).blocks == {}
    assert dataclasses.replace(plan).places[1] == Place(plan.feature_map.index, 0)


# ---- noise --------------------------------------------------------------------------------------

NOISE = tuple(
    Noise(node, part, 8 * word, bytes([node, word, 1]), bytes([node, word, 2]))
    for node, part, n_words in ((0, 0, 5), (1, 0, 100), (2, 1, 7))
    for word in range(n_words)
)


class Reading(MixingResident):
    """Adds to the result whatever it reads of its noise; noise is as captured until it is set."""

    def __init__(self, read: Sequence[int], *, together: bool = False, unsteady: bool = False):
        super().__init__(NODES)
        self.noise = {(one.node, one.part, one.offset_bytes): one.first for one in NOISE}
        self.read = [(NOISE[i].node, NOISE[i].part, NOISE[i].offset_bytes) for i in read]
        self.together = together
        self.unsteady = unsteady

    def execute(self) -> None:
        super().execute()
        seen = [self.noise[place][2] - 1 for place in self.read]
        added = min(seen) if self.together else sum(seen)
        result = (ctypes.c_ubyte * 1).from_address(self.words[6])
        result[0] = (result[0] + added + self.unsteady * self.n_executions) % 256


def test_noise_that_nobody_reads_is_set_to_what_the_other_capture_had():
    resident = Reading([])
    assert run_proof(make_bound(ROLES), resident, noise=NOISE).blocks == {}
    assert resident.n_executions == 2  # none for the noise
    assert [*resident.noise.values()] == [one.again for one in NOISE]


@pytest.mark.parametrize("word", [0, 4, 5, 50, 104, 105, 111])
def test_noise_that_is_read_is_found_and_named(word):
    resident = Reading([word])
    one = NOISE[word]
    where = (
        rf"^kernel {one.node} word {one.offset_bytes} differs between two captures.*depend on it"
    )
    with pytest.raises(CaptureError, match=where):
        run_proof(make_bound(ROLES), resident, noise=NOISE)
    assert resident.n_executions <= 4 + 2 * 7  # it is halved, not tried word by word


def test_one_of_several_words_that_are_read_is_named():
    with pytest.raises(CaptureError, match=r"^kernel 0 word 8 differs"):
        run_proof(make_bound(ROLES), Reading([1, 60]), noise=NOISE)


def test_words_that_matter_together_are_named_together():
    with pytest.raises(
        CaptureError, match=r"or one of \d+ other words\) differs between.*initialise all arguments"
    ):
        run_proof(make_bound(ROLES), Reading([1, 110], together=True), noise=NOISE)


def test_what_cannot_be_moved_is_not_blamed_on_noise():
    resident = Reading([3])
    resident.frozen = [4]
    with pytest.raises(CaptureError, match="another result at other addresses"):
        run_proof(make_bound(ROLES), resident, noise=NOISE)
    with pytest.raises(CaptureError, match="other bits each time"):
        run_proof(make_bound(ROLES), Reading([3], unsteady=True), noise=NOISE)
