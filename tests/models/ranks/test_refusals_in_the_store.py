"""Refusals in a store, written and read by objects that stand for several processes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from offload.distributed import refusals
from offload.distributed.refusals import Epochs, Place, Refusal


class EndingStore:
    """A store of a process that ends before one of its writes."""

    def __init__(self, kept: dist.Store, n_writes: int) -> None:
        self._kept, self._n_writes = kept, n_writes

    def __getattr__(self, name: str) -> object:
        if name in ("add", "append", "compare_set", "set"):
            self._n_writes -= 1
            if self._n_writes < 0:
                raise KeyboardInterrupt
        return getattr(self._kept, name)


def refusal(rank: int) -> Refusal:
    return Refusal(rank, "call", "model.py:1, number 1", "no more data", Place(0, 0))


@pytest.fixture
def kept(monkeypatch) -> dist.Store:
    """The store of all processes."""
    made = dist.HashStore()
    monkeypatch.setattr(refusals, "store", lambda: made)
    return made


def test_a_process_that_ends_while_it_refuses_leaves_others_nothing_to_wait_for(kept, monkeypatch):
    own, other = Epochs("a channel"), Epochs("a channel")
    with monkeypatch.context() as patch:
        ending = EndingStore(kept, n_writes=0)
        patch.setattr(refusals, "store", lambda: ending)
        with pytest.raises(KeyboardInterrupt):
            own.end(refusal(0))
    assert other.read() == 0
    with monkeypatch.context() as patch:
        once = EndingStore(kept, n_writes=1)
        patch.setattr(refusals, "store", lambda: once)
        assert own.end(refusal(0))
    assert other.read() == 1
    assert other.refusals == [refusal(0)]


def test_of_two_that_refuse_at_once_the_second_learns_of_the_first(kept):
    first, second = Epochs("a channel"), Epochs("a channel")
    assert first.end(refusal(0))
    assert not second.end(refusal(1))
    assert second.refusals == first.refusals == [refusal(0)]
    assert second.end(refusal(1))
    assert first.read() == second.read() == 2


def test_words_are_removed_in_order(kept):
    epochs = Epochs("a channel")
    for word in "abc":
        kept.set(word, "")
        epochs.words.append(word)
    epochs.forget_words(2)
    assert [kept.check([word]) for word in "abc"] == [False, False, True]
    assert epochs.words == ["c"]
