"""Which ranks hold weights that stages of training steps write."""

from __future__ import annotations

import gc

import pytest
import torch

import offload
from offload.program import BoundProgram
from offload.run.weight_holders import WEIGHT_HOLDERS, HeldWeights, StageWeights, WeightHolders

ALL = frozenset({0, 1})
FIRST, SECOND = frozenset({0}), frozenset({1})


def storage() -> torch.UntypedStorage:
    return torch.ones(4).untyped_storage()


def test_all_ranks_hold_a_weight_until_some_write_it_and_after_it_was_gathered():
    holders, one, other = WeightHolders(), storage(), storage()
    assert holders.of(one) is None
    holders.write([(one, FIRST)])
    assert holders.of(one) == FIRST
    assert holders.of(other) is None
    holders.write([(one, SECOND), (other, FIRST)])
    assert (holders.of(one), holders.of(other)) == (SECOND, FIRST)
    holders.gather([one])
    assert (holders.of(one), holders.of(other)) == (None, FIRST)


def test_the_generation_changes_with_changes_alone():
    holders, one = WeightHolders(), storage()
    seen = [holders.generation]
    for change in (
        lambda: holders.write([(one, FIRST)]),
        lambda: holders.write([(one, SECOND)]),
        lambda: holders.gather([one]),
    ):
        change()
        seen.append(holders.generation)
    assert len(set(seen)) == len(seen)
    holders.write([(one, SECOND)])
    before = holders.generation
    holders.write([(one, SECOND)])
    assert holders.generation == before


def test_a_freed_weight_is_forgotten_and_never_mistaken_for_another():
    holders = WeightHolders()
    for _ in range(200):
        one = storage()
        assert holders.of(one) is None
        holders.write([(one, FIRST)])
        del one
    gc.collect()
    holders.write([(storage(), SECOND)])
    assert len(holders._holders) == 1


@pytest.fixture
def whole() -> BoundProgram:
    with torch.no_grad():
        captured = offload.capture(torch.nn.Linear(3, 2).eval(), torch.ones(1, 3))
    return captured.bound


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
    WEIGHT_HOLDERS.gather(other.storage(one) for one in whole.bindings.weights)
    everywhere.begin_call()
    other.begin_call()
    with pytest.raises(offload.BindingError, match=r"rank 0 holds old content.*on rank 1"):
        training.begin_call()
