"""The proof of noise: words that no launch reads are overwritten, and others are named."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from mixing_residents import NODES, ROLES, MixingResident, make_bound, run_proof

from offload.backends.captured.relocation.words import Noise
from offload.errors import CaptureError

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
    run_proof(make_bound(ROLES), resident, noise=NOISE)
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
