"""Which ranks hold weights that stages of training steps write."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import offload
from offload.program import BoundProgram
from offload.run.weight_holders import (
    WEIGHT_HOLDERS,
    HeldWeights,
    StageWeights,
    WeightHolders,
    weak_weight,
)

ALL = frozenset({0, 1})
FIRST, SECOND = frozenset({0}), frozenset({1})


WEIGHTS = [torch.ones(4) for _ in range(2)]


def weight(number: int = 0) -> StorageWeakRef:
    return StorageWeakRef(WEIGHTS[number].untyped_storage())


def test_all_ranks_hold_a_weight_until_some_write_it_and_after_it_was_gathered():
    holders, one, other = WeightHolders(), weight(0), weight(1)
    assert holders.of(one) is None
    holders.write({one: FIRST})
    assert holders.of(one) == FIRST
    assert holders.of(other) is None
    holders.write({one: SECOND, other: FIRST})
    assert (holders.of(one), holders.of(other)) == (SECOND, FIRST)
    holders.gather([one])
    assert (holders.of(one), holders.of(other)) == (None, FIRST)


def test_the_generation_changes_with_changes_alone():
    holders, one = WeightHolders(), weight()
    seen = [holders.generation]
    for change in (
        lambda: holders.write({one: FIRST}),
        lambda: holders.write({one: SECOND}),
        lambda: holders.gather([one]),
    ):
        change()
        seen.append(holders.generation)
    assert len(set(seen)) == len(seen)
    holders.write({one: SECOND})
    before = holders.generation
    holders.write({one: SECOND})
    assert holders.generation == before


def test_a_freed_weight_is_forgotten_and_never_mistaken_for_another():
    holders = WeightHolders()
    for _ in range(200):
        tensor = torch.ones(4)
        one = StorageWeakRef(tensor.untyped_storage())
        assert holders.of(one) is None
        holders.write({one: FIRST})
        del tensor
    assert one.expired()
    holders.write({weight(): SECOND})
    assert len(holders._holders) == 1


def small() -> BoundProgram:
    with torch.no_grad():
        captured = offload.capture(torch.nn.Linear(3, 2).eval(), torch.ones(1, 3))
    return captured.bound


@pytest.fixture
def whole() -> BoundProgram:
    return small()


def held(whole: BoundProgram, used: frozenset[int], written: frozenset[int]) -> HeldWeights:
    weights = list(whole.bindings.weights)
    writes = dict.fromkeys(weights, written) if written else {}
    return HeldWeights(whole, StageWeights(dict.fromkeys(weights, used), writes))


def test_executables_in_other_stages_are_refused_until_the_weights_are_gathered(whole):
    training, alike = held(whole, FIRST, FIRST), held(whole, FIRST, FIRST)
    other, everywhere = held(whole, SECOND, SECOND), held(whole, ALL, frozenset())
    training.begin_call()
    alike.begin_call()
    training.begin_call()
    for refused in (other, everywhere, other):
        with pytest.raises(offload.BindingError, match=r"weight: rank 1 holds old content"):
            refused.begin_call()
    WEIGHT_HOLDERS.gather({weak_weight(whole, one) for one in whole.bindings.weights})
    everywhere.begin_call()
    other.begin_call()
    with pytest.raises(offload.BindingError, match=r"rank 0 holds old content.*on rank 1"):
        training.begin_call()


def test_an_executable_keeps_no_weight_alive():
    whole = small()
    weights = [weak_weight(whole, one) for one in whole.bindings.weights]
    executable = held(whole, ALL, frozenset())
    assert not any(one.expired() for one in weights)
    del whole
    gc.collect()
    assert all(one.expired() for one in weights)
    executable.begin_call()
