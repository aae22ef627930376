"""Remains of addresses in uninitialised bytes.

An argument's tail holds former content of the host's stack: often the address of a host object,
which differs between captures or is the same, depending on the heap; or the address of an
allocation, which is the same in one layout. Half of it may be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.backends.captured.relocation.addresses import Meanings, Owned
from offload.backends.captured.relocation.captures import RANDOM_OWNER, GraphCapture
from offload.backends.captured.relocation.words import HALF_BYTES, WORD_BYTES, NoiseKind, differing

_HALF_BITS = 8 * HALF_BYTES


class StaleWords:
    """Recognises words that kernels do not read, though they follow the layout."""

    def __init__(
        self,
        captures: Sequence[GraphCapture],
        meanings: Meanings,
        owned: Sequence[Owned],
        decoy_address: int,
    ) -> None:
        """Use each capture's record of host memory.

        Args:
            captures: to compare.
            meanings: of their allocations, to none of which an address of the host may belong.
            owned: the owners' ranges in each, likewise.
            decoy_address: replaces such words in the proof.
        """
        self._captures = captures
        self._meanings = meanings
        self._owned = owned
        self.decoy = decoy_address.to_bytes(WORD_BYTES, "little")
        # Addresses of a generator's state, which one capture's stack may hold as well. If all
        # captures have them at a place, they are not noise but an owner's, which is determined
        # before.
        self._cells = [
            {one.address for one in capture.owned if one.owner == RANDOM_OWNER}
            for capture in captures
        ]
        self._upper_halves = [_upper_halves(capture) for capture in captures]

    def is_host_address(self, contents: Sequence[bytes], start: int) -> bool:
        """Whether all captures have an address of the host there, or some a random cell's.

        Args:
            contents: the part that holds it, by capture.
            start: its first byte: any multiple of four, since structures of four-byte numbers are
                aligned to that.
        """
        if start < 0 or start + WORD_BYTES > len(contents[0]):
            return False
        for content, capture, cells in zip(contents, self._captures, self._cells, strict=True):
            value = int.from_bytes(content[start : start + WORD_BYTES], "little")
            if value not in cells and (
                value not in capture.host_words
                or self._meanings.is_of_pool(value)
                or any(owned.candidates(value) for owned in self._owned)
            ):
                return False
        return True

    def replaced(
        self, contents: Sequence[bytes], begin: int, end: int, parameters: Sequence[tuple[int, int]]
    ) -> tuple[bytes, NoiseKind] | None:
        """The proof's replacement for a word, or half of one, that follows the layout and is noise.

        Args:
            contents: the part that holds it, by capture.
            begin: its first byte there.
            end: one past its last byte. The last word of a part may be shorter.
            parameters: (offset, size) in bytes of each argument in the part.

        Returns:
            None if something differs that is not known to be noise.
        """
        if end - begin == WORD_BYTES and self.is_host_address(contents, begin):
            return self.decoy, NoiseKind.HOST
        outcome, kind = b"", NoiseKind.DIFFERS
        for at in range(begin, end, HALF_BYTES):
            halves = [content[at : min(end, at + HALF_BYTES)] for content in contents]
            if follows_layout(halves):
                other = next(half for half in halves if half != halves[0])
                if self._are_upper_halves(halves):
                    kind = NoiseKind.UPPER_HALF
                    upper = self.decoy[HALF_BYTES:]
                    outcome += other if upper == halves[0] else upper
                elif _is_small(at, halves, parameters):
                    if kind is NoiseKind.DIFFERS:
                        kind = NoiseKind.SMALL
                    outcome += other
                else:
                    return None
            else:
                outcome += halves[1]
        return outcome, kind

    def _are_upper_halves(self, halves: Sequence[bytes]) -> bool:
        return len(halves[0]) == HALF_BYTES and all(
            int.from_bytes(half, "little") in known
            for half, known in zip(halves, self._upper_halves, strict=True)
        )


def bytes_follow_layout(words: Sequence[bytes]) -> bool:
    """Whether some byte differs, but not in one layout."""
    first, again, *others = words
    return any(
        first[index] != other[index]
        for index, one in enumerate(again)
        if one == first[index]
        for other in others
    )


def follows_layout(halves: Sequence[bytes]) -> bool:
    """Whether half a word differs, but not in one layout: four bytes may be a separate number.

    It may also be the remainder of a stale address, but not every such half shows that. Nor can the
    proof try any: it would have to set the bytes to those of another layout, and a kernel that
    reads a distance between two addresses would follow it to unmapped memory. Bytes that are equal
    by chance beside noise in one half are accepted, as no distance between allocations fits into
    less than four bytes.
    """
    return halves[0] == halves[1] and len(set(halves)) > 1


def differs_beside(words: Sequence[bytes]) -> bool:
    """Whether half a word follows the layout."""
    return any(
        follows_layout([word[begin : begin + HALF_BYTES] for word in words])
        for begin in range(0, len(words[0]), HALF_BYTES)
    )


def _is_small(at: int, halves: Sequence[bytes], parameters: Sequence[tuple[int, int]]) -> bool:
    """Whether the differing bytes are parameters of a single byte.

    As for function objects without members, which are passed uninitialised.
    """
    small = {begin for begin, size_bytes in parameters if size_bytes == 1}
    mask = bytes(len(halves[0]))
    for half in halves[1:]:
        mask = bytes(
            one | other for one, other in zip(mask, differing(halves[0], half), strict=True)
        )
    return all(at + index in small for index, differs in enumerate(mask) if differs)


def _upper_halves(capture: GraphCapture) -> frozenset[int]:
    found = set(capture.host_upper_halves)
    for one in capture.allocations:
        begin, end = one.address >> _HALF_BITS, (one.address + one.size_bytes) >> _HALF_BITS
        found.update(range(begin, end + 1))
    return frozenset(found - {0})
