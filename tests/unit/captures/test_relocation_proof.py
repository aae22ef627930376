"""The proof at load: it finds each word that was missed, and leaves nothing behind."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from mixing_residents import (
    ACT,
    IN,
    LIFETIMES,
    MACHINE,
    N_BYTES,
    NODES,
    OUT,
    ROLES,
    WEIGHT,
    WORDS,
    MixingResident,
    make_bound,
    run_proof,
)

from offload.backends.captured.relocation import contents
from offload.backends.captured.relocation.proof import apart
from offload.backends.captured.relocation.steadiness import Steadiness
from offload.errors import CaptureError
from offload.plan import Lifetime, place_values
from offload.program import (
    Overlap,
)


def test_a_resident_that_follows_its_words_is_proved_and_leaves_no_memory():
    resident = MixingResident(NODES)
    assert run_proof(make_bound(ROLES), resident) == Steadiness()
    assert resident.n_executions == 2


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


def test_a_missed_word_is_refused_with_the_result_and_the_advice():
    with pytest.raises(
        CaptureError,
        match=r"different result at other addresses: output3 .*leave that out; load\(verify",
    ):
        run_proof(make_bound(ROLES), MixingResident(NODES, frozen=[0]))


SAMPLES = {
    "fractions": torch.arange(16) / 7,
    "zeros": torch.zeros(16),
    "ones": torch.ones(16),
    "indices": torch.arange(8),
    "no index but 0": torch.zeros(8, dtype=torch.int64),
    "made-up numbers": "float32",
    "made-up indices": "int64",
}


@pytest.mark.parametrize("word", range(7))
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_missed_word_is_found(sample, word):
    """A recorded input is the only one that executes, so old memory is cleared for it."""
    if isinstance(sample, str):
        bound = make_bound(ROLES, sample)
    else:
        dtype = str(sample.dtype).removeprefix("torch.")
        bound = make_bound(ROLES, dtype, input_samples=(sample.numpy().tobytes(),))
    run_proof(bound, MixingResident(NODES))
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
    run_proof(bound, MixingResident(nodes), **more)
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

    bound = make_bound(ROLES, dtype, input_samples=(bytes(N_BYTES),))
    run_proof(bound, Below(NODES), Below(NODES))
    with pytest.raises(CaptureError, match="a different result at other addresses: output3"):
        run_proof(bound, Below(NODES, [6]), Below(NODES))


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
    run_proof(bound, Constant(NODES), Constant(NODES))
    for word in (1, 3):
        with pytest.raises(CaptureError, match="still writes to its old addresses, in feature map"):
            run_proof(bound, Constant(NODES, [word]), Constant(NODES))


def test_the_memory_of_the_capture_is_changed_before_every_slot_has_moved():
    """So that addresses outside all words show: once, after two executions."""
    resident, unshared, at = MixingResident(NODES), MixingResident(NODES), []
    run_proof(
        make_bound(ROLES),
        resident,
        unshared,
        before_moved=lambda: at.append((unshared.n_executions, resident.n_executions)),
    )
    assert at == [(2, 1)]
    assert resident.n_executions == 2


@pytest.mark.parametrize("n_bytes", [8, 24, N_BYTES])
def test_what_is_compared_in_chunks_is_told_by_the_byte(monkeypatch, n_bytes):
    monkeypatch.setattr(contents, "CHUNK_BYTES", n_bytes)
    run_proof(make_bound(ROLES), MixingResident(NODES))
    with pytest.raises(CaptureError, match=r"output3 .* differs from byte 0 on"):
        run_proof(make_bound(ROLES), MixingResident(NODES, frozen=[0]))

    class Late(MixingResident):
        """Gives other bytes at the end."""

        def execute(self) -> None:
            super().execute()
            ctypes.memset(self.words[6] + 61, 1, 2)

    with pytest.raises(CaptureError, match=r"output3 .* differs from byte 61 on"):
        run_proof(make_bound(ROLES), Late(NODES))


@pytest.mark.parametrize("word", [1, 2, 4])
def test_executions_before_the_move_draw_other_random_numbers(word):
    """Otherwise reads or writes through a missed word would find the same content as before."""

    class Constant(MixingResident):
        state = 0

        def execute(self) -> None:
            ctypes.memset(self.words[1], 1 + self.state, N_BYTES)  # reads no input
            super().execute()

    class Drawing(Constant):
        def draw(self, state: int) -> None:
            self.state = state

    def run(kind: type[Constant], frozen: Sequence[int]) -> None:
        run_proof(make_bound(ROLES), kind(NODES[1:], frozen), kind(NODES[1:]))

    run(Drawing, [])
    run(Constant, [word])
    with pytest.raises(CaptureError, match=r"a different result|old addresses"):
        run(Drawing, [word])


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
    run_proof(bound, MixingResident(NODES), plan=plan)
