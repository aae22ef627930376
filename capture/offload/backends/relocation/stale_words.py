"""What is left of addresses in bytes that nobody initialised.

An argument's tail holds what lay on the host's stack before: often the address of an object of the
host, of which one capture has another than the next, or the same, as the heap has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.backends.relocation.addresses import Layout, Owned
from offload.backends.relocation.captures import RANDOM_OWNER, GraphCapture
from offload.backends.relocation.words import WORD_BYTES, differing

_HALF_BYTES = WORD_BYTES // 2


class StaleHostWords:
    """Tells addresses of the host's memory, which kernels are not given to read."""

    def __init__(
        self,
        captures: Sequence[GraphCapture],
        layouts: Sequence[Layout],
        owned: Sequence[Owned],
        decoy_address: int,
    ) -> None:
        """Tell them by what each capture says of its own (`GraphCapture.host_words`).

        Args:
            captures: that are compared.
            layouts: of their allocations, to any of which no such address may belong.
            owned: what somebody keeps in each, likewise.
            decoy_address: what `replaced` puts in their place.
        """
        self._captures = captures
        self._layouts = layouts
        self._owned = owned
        self._decoy = decoy_address.to_bytes(WORD_BYTES, "little")

    def replaced(self, contents: Sequence[bytes], offset: int) -> bytes | None:
        """A word of the first capture with the decoy instead of what such addresses explain.

        An address may begin in the middle of a word, since structures of numbers of four bytes are
        aligned to four; its other half is then the word's beside it.

        Args:
            contents: the part that holds the word, by capture.
            offset: of the word in it, in bytes. The last word of a part may be shorter.

        Returns:
            None if something differs that neither these addresses nor noise beside them explain.
        """
        words = [content[offset : offset + WORD_BYTES] for content in contents]
        outcome, host_mask = bytearray(words[0]), bytearray(len(words[0]))
        for start in (offset - _HALF_BYTES, offset + _HALF_BYTES, offset):
            if self._is_host_address(contents, start):
                begin = max(start, offset)
                end = min(start + WORD_BYTES, offset + len(words[0]))
                here = slice(begin - offset, end - offset)
                outcome[here] = self._decoy[begin - start : end - start]
                host_mask[here] = b"\xff" * (end - begin)
        if not any(host_mask):
            return None
        rest = [masked(word, bytes(host_mask)) for word in words]
        noise_mask = differing(rest[0], rest[1])
        if differs_beside(noise_mask, rest):
            return None
        for index, differs in enumerate(noise_mask):
            if differs:
                outcome[index] = words[1][index]
        return bytes(outcome)

    def _is_host_address(self, contents: Sequence[bytes], start: int) -> bool:
        """Whether all captures have an address of the host there, or some a random cell's."""
        if start < 0 or start + WORD_BYTES > len(contents[0]):
            return False
        values = [
            int.from_bytes(content[start : start + WORD_BYTES], "little") for content in contents
        ]
        return all(
            self._is_cell(value, capture)
            or (
                value in capture.host_words
                and not any(layout.candidates(value) for layout in self._layouts)
                and not any(owned.candidates(value) for owned in self._owned)
            )
            for value, capture in zip(values, self._captures, strict=True)
        )

    def _is_cell(self, value: int, capture: GraphCapture) -> bool:
        """Whether it is where a generator's state lies, which one capture's stack may hold as well.

        What all captures have so is no noise, but of an owner: it does not get here.
        """
        return any(one.owner == RANDOM_OWNER and one.address == value for one in capture.owned)


def masked(word: bytes, mask: bytes) -> bytes:
    """The bytes that the mask does not cover; 0 for the others."""
    return bytes(one & ~other & 0xFF for one, other in zip(word, mask, strict=True))


def differs_beside(mask: bytes, words: Sequence[bytes]) -> bool:
    """Whether half a word that has no noise differs: four bytes are a number of their own.

    It may be what is left of a stale address too, but nothing shows it: only what differs in one
    layout is known to follow nothing. Nor can the proof try it. It would have to set the bytes to
    what another layout has there, and a kernel that reads a distance between two addresses would
    follow it to where nothing lies. Bytes that are alike by chance beside noise in one half are
    let pass, as no distance between allocations fits into less than four bytes.
    """
    for begin in range(0, len(mask), WORD_BYTES // 2):
        half = slice(begin, begin + WORD_BYTES // 2)
        if not any(mask[half]) and len({word[half] for word in words}) > 1:
            return True
    return False
