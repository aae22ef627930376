"""Refusals of words that differ between captures: the kernel, the parameter, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from offload.backends.captured.relocation import advice
from offload.backends.captured.relocation.addresses import Meanings
from offload.backends.captured.relocation.captures import GraphCapture, node_text, place_text
from offload.backends.captured.relocation.words import (
    HALF_BYTES,
    WORD_BYTES,
    FoundWord,
    Noise,
    NoiseKind,
    Unfollowed,
)


class WordRefusals:
    """Refuses words of one graph that cannot be followed."""

    def __init__(
        self,
        capture: GraphCapture,
        launch_names: Sequence[str],
        meanings: Meanings,
        halves_tell: bool,
    ) -> None:
        """Keep what messages name.

        Args:
            capture: the first one.
            launch_names: each launch's operator and source.
            meanings: of words in all captures.
            halves_tell: addresses are also found at odd multiples of half a word.
        """
        self._capture = capture
        self._names = launch_names
        self._meanings = meanings
        self._halves_tell = halves_tell

    def differing(
        self, node: int, part: int, offset: int, what: str, words: Sequence[bytes]
    ) -> NoReturn:
        """Refuse a word that differs.

        Args:
            node: it belongs to.
            part: of the node.
            offset: of the word in the part, in bytes.
            what: it is or is not.
            words: its content in each capture.

        Raises:
            Unfollowed: always.
        """
        place = self._parameter(node, offset, part)
        values = ", ".join(f"0x{int.from_bytes(word, 'little'):x}" for word in words)
        raise Unfollowed(
            f"{self._node(node)}: {place} (at byte {offset}) differs between captures and {what}: "
            f"{values} (twice in one layout, and in two others); expected one allocation and one "
            "offset in each layout, or padding, which differs within one",
            advice.LEAVE_OUT,
        )

    def equally_near(self, node: int, offset: int) -> NoReturn:
        """Refuse an address that is as near to one allocation as to another.

        Raises:
            Unfollowed: always.
        """
        raise Unfollowed(
            f"{self._node(node)}: {self._parameter(node, offset)} is equally near to two "
            "allocations in every layout: expected an address that is nearest to one, since "
            "nothing else shows to which allocation it belongs",
            advice.LEAVE_OUT,
        )

    def check_pieces(self, node: int, found: Sequence[FoundWord], noise: Sequence[Noise]) -> None:
        """Refuse arguments that may hold an address in two pieces: following one requires both.

        Raises:
            Unfollowed: they hold the lower half of one, and the upper half of one elsewhere.
        """
        lower = [offset for _, _, offset, _, _, size_bytes in found if size_bytes == HALF_BYTES]
        upper = [one.offset_bytes for one in noise if one.kind is NoiseKind.UPPER_HALF]
        if lower and upper:
            places = [self._parameter(node, offset) for offset in (lower[0], upper[0])]
            raise Unfollowed(
                f"{self._node(node)}: {places[0]} holds the lower half of an address at byte "
                f"{lower[0]} of its arguments, and {places[1]} the upper half of one (in the word "
                f"at byte {upper[0]}): expected both together",
                advice.PASS_ALONE,
            )

    def check_aligned(self, node: int, offset: int, contents: Sequence[bytes]) -> None:
        """Refuse a differing word that is part of an unaligned address.

        Raises:
            Unfollowed: eight bytes that overlap it are an address.
        """
        first, again, *_ = contents
        for start in range(max(0, offset - WORD_BYTES + 1), offset + WORD_BYTES):
            end = start + WORD_BYTES
            words = [content[start:end] for content in contents]
            is_found = start % HALF_BYTES == 0 and self._halves_tell
            is_noisy = again[start:end] != first[start:end]
            if start == offset or is_found or end > len(first) or is_noisy or len(set(words)) == 1:
                continue
            if self._meanings.at(start, contents):
                raise Unfollowed(
                    f"{self._node(node)}: {self._parameter(node, offset)} holds an address at byte "
                    f"{start} of its arguments: expected addresses at multiples of {HALF_BYTES}",
                    advice.PASS_ALONE,
                )

    def _node(self, node: int) -> str:
        """The node: kind, name, and the launch that made it."""
        return node_text(self._capture, self._names, node)

    def _parameter(self, node: int, offset: int, part: int = 0) -> str:
        """The parameter that holds a byte of the arguments."""
        return place_text(self._capture, node, part, offset)
