"""The proof at load, on a resident written in Python whose memory is the host's."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import random
import struct
from collections.abc import Iterator, Sequence

import pytest
import torch

from offload.backends.captured.relocation import contents
from offload.backends.captured.relocation.proof import apart, prove
from offload.backends.captured.relocation.proof_bases import Placed
from offload.backends.captured.relocation.steadiness import N_UNSTEADY, Steadiness
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
    """No address is allocated twice, so that a missed word points to no address in use."""

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}
        self.freed: list[object] = []

    def allocate(self, size_bytes: int) -> int:
        block = ctypes.create_string_buffer(max(size_bytes, 1))
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        self.freed.append(self.blocks.pop(address))

    def fill(self, address: int, size_bytes: int) -> None:
        ctypes.memset(address, 0, size_bytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def chunks(self, address: int, size_bytes: int, chunk_bytes: int) -> Iterator[torch.Tensor]:
        for begin in range(0, size_bytes, chunk_bytes):
            n_bytes = min(chunk_bytes, size_bytes - begin)
            content = (ctypes.c_ubyte * n_bytes).from_address(address + begin)
            yield torch.frombuffer(content, dtype=torch.uint8)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)


class MixingResident:
    """Each node mixes its sources and its number byte by byte into its destination.

    `frozen` words keep their first address.
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


def test_the_spread_of_two_contents():
    one, other = torch.tensor([1.0, 2.0, 3.0, -0.0]), torch.tensor([1.0, 2.5, 1.0, 0.0])
    stretches = [
        contents.Stretch("numbers", each.data_ptr(), each.nbytes, "float32")
        for each in (one, other)
    ]
    assert contents.spread(HostMemory(), *stretches) == contents.Spread(2.0, 4.25 / 4, 3)


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


def test_each_execution_is_waited_for():
    class Later(MixingResident):
        """Executes only once it is waited for, as a device may."""

        n_submitted = 0

        def execute(self) -> None:
            self.n_submitted += 1

        def finish(self) -> None:
            while self.n_executions < self.n_submitted:
                super().execute()

    resident = Later(NODES)
    run_proof(make_bound(ROLES), resident)
    assert resident.n_executions == 2


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
        match=r"different result at other addresses: output3 .*leave that out; load\(verify",
    ):
        run_proof(make_bound(ROLES, dtype), MixingResident(NODES, frozen=[word]))


@pytest.mark.parametrize("word", [1, 3, 6])
def test_a_word_that_writes_at_its_old_address_is_found(word):
    with pytest.raises(CaptureError, match=r"a different result|old addresses"):
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
    """It is the only input that executes, so old memory is cleared for it."""
    sample = SAMPLES[name]
    bound = make_bound(
        ROLES, str(sample.dtype).removeprefix("torch."), input_samples=(sample.numpy().tobytes(),)
    )
    assert run_proof(bound, MixingResident(NODES)).blocks == {}
    with pytest.raises(CaptureError, match=r"a different result|old addresses"):
        run_proof(bound, MixingResident(NODES, frozen=[word]))


@pytest.mark.parametrize("word", range(7))
def test_a_missed_word_is_found_where_one_input_alone_is_made_up(word):
    """A result that depends only on the other input has the expected bits after any execution."""
    nodes = (((0,), 1), ((2,), 3), ((4, 5), 6))
    samples = (torch.arange(16) / 7, torch.zeros(16))
    bound = make_bound(
        (IN, IN, ACT, ACT, OUT), input_samples=tuple(one.numpy().tobytes() for one in samples)
    )
    more = {"lifetimes": [Lifetime(0, 3)] * 5, "words": (0, 2, 2, 3, 3, 1, 4)}
    assert run_proof(bound, MixingResident(nodes), **more).blocks == {}
    with pytest.raises(CaptureError, match=r"a different result|old addresses"):
        run_proof(bound, MixingResident(nodes, frozen=[word]), **more)


@pytest.mark.parametrize("tile_bytes", [N_BYTES // 2, N_BYTES])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_missed_word_of_an_output_is_found_where_all_results_are_zero(
    monkeypatch, dtype, tile_bytes
):
    """As results are where a threshold is above all made-up replacements of zeros."""
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
    with pytest.raises(CaptureError, match="a different result at other addresses: output3"):
        run([6])


def test_writing_to_an_old_address_is_found_where_the_result_is_right():
    also = (*NODES, ((4,), 7))  # a second store of a value that is not read
    words = (*WORDS, 2)
    with pytest.raises(
        CaptureError,
        match=r"old addresses, in feature map .*from byte .* on: expected the same bits, .*leave",
    ):
        run_proof(make_bound(ROLES), MixingResident(also, frozen=[7]), words=words)


def test_where_results_are_constant_a_write_to_an_old_activation_is_found():
    """Nothing that is patched shows in a result; the old memory still holds other data."""

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
    """So that addresses outside all words show: once, after two executions."""
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
    assert at == [(2, 1)]
    assert resident.n_executions == 2


@pytest.mark.parametrize("n_bytes", [8, 24, N_BYTES])
def test_what_is_compared_in_chunks_is_told_by_the_byte(monkeypatch, n_bytes):
    monkeypatch.setattr(contents, "CHUNK_BYTES", n_bytes)
    assert run_proof(make_bound(ROLES), MixingResident(NODES)).blocks == {}
    with pytest.raises(CaptureError, match=r"output3 .* differs from byte 0 on"):
        run_proof(make_bound(ROLES), MixingResident(NODES, frozen=[0]))

    class Late(MixingResident):
        """Gives other bytes at the end."""

        def execute(self) -> None:
            super().execute()
            ctypes.memset(self.words[6] + 61, 1, 2)

    bound = make_bound(ROLES)
    plan = place_values(bound.program, MACHINE, lifetimes=LIFETIMES)
    unshared = placed(apart(bound.program, plan), MixingResident(NODES))
    with pytest.raises(CaptureError, match=r"output3 .* differs from byte 61 on"):
        prove(bound, placed(plan, Late(NODES)), unshared, HostMemory())


# ---- kernels that are not deterministic ---------------------------------------------------------


class Summing(MixingResident):
    """Adds its sources and its number to half of its destination, as numbers.

    The last node's result differs each time by up to `jitter`, as for additions in any order; only
    from execution `steady` on, counted over all residents of `counter`.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[Sequence[int], int]],
        frozen: Sequence[int] = (),
        *,
        jitter: float,
        counter: list[int] | None = None,
        steady: int = 0,
    ) -> None:
        super().__init__(nodes, frozen)
        self.jitter = jitter
        self.counter = [0] if counter is None else counter
        self.steady = steady
        self.draw = random.Random(7 + len(frozen))

    def execute(self) -> None:
        for number, (sources, destination) in enumerate(self.nodes):
            read = [(ctypes.c_float * 16).from_address(self.words[one]) for one in sources]
            written = (ctypes.c_float * 16).from_address(self.words[destination])
            is_noisy = number == len(self.nodes) - 1 and self.counter[0] >= self.steady
            for item in range(16):
                total = number + 1 + sum(one[item] for one in read)
                written[item] = total + self.jitter * is_noisy * self.draw.uniform(-1, 1)
        self.n_executions += 1
        self.counter[0] += 1


def prove_summing(frozen: Sequence[int] = (), *, jitter: float, steady: int = 0) -> Steadiness:
    """Prove residents of one graph; these words of the loaded one keep their first address."""
    bound = make_bound(ROLES)
    plan = place_values(bound.program, MACHINE, lifetimes=LIFETIMES)
    counter = [0]
    residents = [
        Summing(NODES, words, jitter=jitter, counter=counter, steady=steady)
        for words in (frozen, ())
    ]
    memory = HostMemory()
    found = prove(
        bound, placed(plan, residents[0]), placed(apart(bound.program, plan), residents[1]), memory
    )
    assert memory.blocks == {}
    return found


def test_a_steady_graph_is_executed_twice_where_it_was_captured_and_nothing_is_allowed():
    found = prove_summing(jitter=0)
    assert found == Steadiness()
    assert found.notes() == ()


def test_a_graph_that_is_not_deterministic_is_proved_by_what_was_measured_and_says_so():
    found = prove_summing(jitter=1e-3)
    ((name, spread),) = found.measured.items()
    assert name.startswith("output3")
    assert 0 < spread.largest <= 2e-3 + 1e-6
    assert spread.n_apart > 8
    assert found.n_executions == N_UNSTEADY
    assert found.notes() == (
        f"{name} has different bits at each execution ({spread.n_apart} numbers, by up to "
        f"{spread.largest:.3g}, in 6 executions at the captured addresses); the proof allowed 8 "
        "times that at other addresses, and required the same bits of other results",
    )


@pytest.mark.parametrize("word", range(7))
@pytest.mark.parametrize("jitter", [1e-6, 1e-3])
def test_a_missed_word_is_found_in_a_graph_that_is_not_deterministic(word, jitter):
    with pytest.raises(CaptureError, match=r"a different result|old addresses"):
        prove_summing([word], jitter=jitter)


def test_results_that_should_be_near_and_are_not_are_refused_with_the_distance():
    with pytest.raises(
        CaptureError,
        match=r"output3 .*from byte 0 on: expected a difference below [0-9.]+, .*differ less",
    ):
        prove_summing([4], jitter=1e-3)


def test_noise_as_large_as_the_results_proves_nothing_and_is_refused():
    with pytest.raises(
        CaptureError,
        match=r"different bits of .*differ too much.*use_deterministic_algorithms\(True\)",
    ):
        prove_summing(jitter=50.0)


def test_a_graph_that_was_steady_twice_by_chance_is_measured_anew():
    """Its noise begins with the execution that has moved: then the proof is repeated."""
    found = prove_summing(jitter=1e-3, steady=3)
    assert [name.partition(" ")[0] for name in found.measured] == ["output3"]
    assert found.n_executions == N_UNSTEADY
    with pytest.raises(CaptureError, match=r"a different result|old addresses"):
        prove_summing([0], jitter=1e-3, steady=3)


def test_only_what_was_not_the_same_bits_may_differ():
    """A weight that is written is steady, and wrong by less than the output's noise."""
    bound = make_bound((*ROLES, WEIGHT), weights={4: (torch.arange(16.0),)})
    words, nodes = (*WORDS, 4), (((), 7), *NODES)
    plan = place_values(bound.program, MACHINE, lifetimes=(*LIFETIMES, Lifetime(0, 3)))

    class Slightly(Summing):
        def execute(self) -> None:
            super().execute()
            (ctypes.c_float * 16).from_address(self.words[7])[3] += 1e-4

    unshared = placed(apart(bound.program, plan), Summing(nodes, jitter=1e-2), words)
    prove(bound, placed(plan, Summing(nodes, jitter=1e-2), words), unshared, HostMemory())
    with pytest.raises(CaptureError, match=r"weight4 .*from byte 12 on: expected the same bits"):
        prove(bound, placed(plan, Slightly(nodes, jitter=1e-2), words), unshared, HostMemory())


def test_a_number_that_is_none_once_is_no_noise():
    """No number is near NaN: no distance can be allowed."""

    class Sometimes(MixingResident):
        def execute(self) -> None:
            super().execute()
            first = math.nan if self.n_executions % 2 else 1.0
            ctypes.memmove(self.words[6], struct.pack("<16f", first, *[1.0] * 15), N_BYTES)

    bound = make_bound(ROLES)
    plan = place_values(bound.program, MACHINE, lifetimes=LIFETIMES)
    unshared = placed(apart(bound.program, plan), Sometimes(NODES))
    with pytest.raises(CaptureError, match=r"different bits of .* at each execution"):
        prove(bound, placed(plan, Sometimes(NODES)), unshared, HostMemory())


@pytest.mark.parametrize("word", [1, 2, 4])
def test_executions_before_the_move_draw_other_random_numbers(word):
    """Otherwise reads or writes through a missed word would find the same content as before."""

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
    with pytest.raises(CaptureError, match=r"a different result|old addresses"):
        run([word])


def test_lifetimes_that_are_too_short_are_found():
    short = (Lifetime(0, 3), Lifetime(0, 1), Lifetime(1, 3), Lifetime(0, 3))
    with pytest.raises(CaptureError, match="a different result"):
        run_proof(make_bound(ROLES), MixingResident(NODES), lifetimes=short)


def test_what_is_written_is_a_copy():
    """An input and a weight that are written are also compared, and stay unchanged."""
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
    """Adds to the result the value that it reads of its noise; noise is as captured until set."""

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
    assert resident.n_executions == 2  # no execution for the noise
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
    assert resident.n_executions <= 4 + 2 * 7  # halved, not tried word by word


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
    with pytest.raises(CaptureError, match="a different result at other addresses"):
        run_proof(make_bound(ROLES), resident, noise=NOISE)
    with pytest.raises(CaptureError, match=r"different bits of output3.*6 executions"):
        run_proof(make_bound(ROLES), Reading([3], unsteady=True), noise=NOISE)
