"""The proof of graphs that are not deterministic: what it measures, allows and refuses."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections.abc import Sequence

import pytest
import torch
from mixing_residents import (
    LIFETIMES,
    N_BYTES,
    NODES,
    ROLES,
    WEIGHT,
    WORDS,
    HostMemory,
    MixingResident,
    make_bound,
    run_proof,
)

from offload.backends.captured.relocation import contents
from offload.backends.captured.relocation.steadiness import N_UNSTEADY, Steadiness
from offload.errors import CaptureError
from offload.plan import Lifetime


def test_the_spread_of_two_contents():
    one, other = torch.tensor([1.0, 2.0, 3.0, -0.0]), torch.tensor([1.0, 2.5, 1.0, 0.0])
    stretches = [
        contents.Stretch("numbers", each.data_ptr(), each.nbytes, "float32")
        for each in (one, other)
    ]
    assert contents.spread(HostMemory(), *stretches) == contents.Spread(2.0, 4.25 / 4, 3)


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
        self.random = random.Random(7 + len(frozen))

    def execute(self) -> None:
        for number, (sources, destination) in enumerate(self.nodes):
            read = [(ctypes.c_float * 16).from_address(self.words[one]) for one in sources]
            written = (ctypes.c_float * 16).from_address(self.words[destination])
            is_noisy = number == len(self.nodes) - 1 and self.counter[0] >= self.steady
            for item in range(16):
                total = number + 1 + sum(one[item] for one in read)
                written[item] = total + self.jitter * is_noisy * self.random.uniform(-1, 1)
        self.n_executions += 1
        self.counter[0] += 1


def prove_summing(frozen: Sequence[int] = (), *, jitter: float, steady: int = 0) -> Steadiness:
    """Prove residents of one graph; these words of the loaded one keep their first address."""
    counter = [0]
    loaded, unshared = (
        Summing(NODES, words, jitter=jitter, counter=counter, steady=steady)
        for words in (frozen, ())
    )
    return run_proof(make_bound(ROLES), loaded, unshared)


def test_a_steady_graph_is_executed_twice_where_it_was_captured_and_nothing_is_allowed():
    found = prove_summing(jitter=0)
    assert (found, found.notes()) == (Steadiness(), ())


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
    nodes = (((), 7), *NODES)

    class Slightly(Summing):
        def execute(self) -> None:
            super().execute()
            (ctypes.c_float * 16).from_address(self.words[7])[3] += 1e-4

    def run(loaded: Summing) -> None:
        lifetimes = (*LIFETIMES, Lifetime(0, 3))
        unshared = Summing(nodes, jitter=1e-2)
        run_proof(bound, loaded, unshared, lifetimes=lifetimes, words=(*WORDS, 4))

    run(Summing(nodes, jitter=1e-2))
    with pytest.raises(CaptureError, match=r"weight4 .*from byte 12 on: expected the same bits"):
        run(Slightly(nodes, jitter=1e-2))


def test_a_number_that_is_none_once_is_no_noise():
    """No number is near NaN: no distance can be allowed."""

    class Sometimes(MixingResident):
        def execute(self) -> None:
            super().execute()
            first = math.nan if self.n_executions % 2 else 1.0
            ctypes.memmove(self.words[6], struct.pack("<16f", first, *[1.0] * 15), N_BYTES)

    with pytest.raises(CaptureError, match=r"different bits of .* at each execution"):
        run_proof(make_bound(ROLES), Sometimes(NODES), Sometimes(NODES))
