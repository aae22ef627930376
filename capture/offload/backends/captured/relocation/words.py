"""What discovery finds in a captured graph: words, noise, constants with an owner."""

from __future__ import annotations

import dataclasses
import enum
import struct

from offload.errors import CaptureError

WORD_BYTES = 8
HALF_BYTES = WORD_BYTES // 2


class Unfollowed(CaptureError):
    """A word that cannot be followed, and what the caller can do.

    Attributes:
        what, advice: the two apart, for who goes on without following it.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.advice = advice


class CapturesDiffer(Exception):
    """Captures of one Program are not the same graph; capturing again may help.

    Attributes:
        where: the node at which they part.
    """

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A word that holds an address: that of a Value, plus an offset; or the lower half of it.

    Attributes:
        node, part, offset_bytes: where it stands in the graph.
        value: index of the Value; those beyond the Program's own are scratch.
        value_offset_bytes: may lie outside the Value: some kernels are given such addresses.
        size_bytes: HALF_BYTES of the lower half.
    """

    node: int
    part: int
    offset_bytes: int
    value: int
    value_offset_bytes: int
    size_bytes: int = WORD_BYTES


def differing(one: bytes, other: bytes) -> bytes:
    """0xff for each byte that differs, 0 for the others."""
    return bytes(0xFF * (first != second) for first, second in zip(one, other, strict=True))


def words_of(content: bytes) -> tuple[int, ...]:
    """The whole words of a part."""
    n_words = len(content) // WORD_BYTES
    return struct.unpack_from(f"<{n_words}Q", content)


class NoiseKind(enum.StrEnum):
    """By what noise is known; the values say it in messages."""

    DIFFERS = "differs between two captures in one layout"
    HOST = "holds an address of the host's memory in every capture, which kernels cannot read"
    UPPER_HALF = "holds the upper half of an address, beside no lower one"
    SMALL = "differs between layouts, in a single byte, too small to say where anything lies"
    CELL = "holds an address of a random generator's state, from which nothing is drawn"


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """Bytes that nobody initialised.

    Attributes:
        node, part, offset_bytes: where the word (or half of one) stands.
        first: what the capture holds there that is executed.
        again: what the proof sets instead: what the other capture in its layout holds, and for
            noise of another kind the address of a decoy.
        kind: by what it is known.
    """

    node: int
    part: int
    offset_bytes: int
    first: bytes
    again: bytes
    kind: NoiseKind = NoiseKind.DIFFERS

    @property
    def mask(self) -> bytes:
        """0xff for each byte that the proof changes."""
        return differing(self.first, self.again)


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedConstant:
    """A word with an address outside the pool, that stays as it is, and who keeps that memory."""

    node: int
    part: int
    offset_bytes: int
    address: int
    owner: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unexplained:
    """A word that differs between captures, and is no address that can be followed.

    It may be noise, which only another capture in the same layout could show, or say where
    something lies in a way of its own.

    Attributes:
        node, part, offset_bytes: where it stands.
        why: names kernel, byte and values.
        advice: what a user can do about it.
    """

    node: int
    part: int
    offset_bytes: int
    why: str
    advice: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Discovery:
    """What the words of the first capture's graph are; those not listed are plain constants.

    Attributes:
        words: that hold addresses, by node, part and offset.
        noise: that mean nothing.
        constants: that hold addresses which never change.
        scratch_bytes: sizes of the scratch Values that words name, which follow the Program's own.
        unexplained: words of nodes that have to stay as they were captured.
    """

    words: tuple[Word, ...]
    noise: tuple[Noise, ...]
    constants: tuple[OwnedConstant, ...]
    scratch_bytes: tuple[int, ...]
    unexplained: tuple[Unexplained, ...] = ()
