"""The results of discovery in a captured graph: words, noise, constants with an owner."""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Iterable

from offload.backends.captured.relocation.captures import GraphCapture
from offload.errors import CaptureError

WORD_BYTES = 8
HALF_BYTES = WORD_BYTES // 2


class Unfollowed(CaptureError):
    """A word that cannot be followed, and the remedy.

    Attributes:
        what, advice: the two parts, for callers that continue without following it.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.advice = advice


class CapturesDiffer(Exception):
    """Captures of one Program are not the same graph; capturing again may help.

    Attributes:
        where: the first node that differs.
    """

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A word that holds the address of a Value plus an offset, or the lower half of it.

    Attributes:
        node, part, offset_bytes: its place in the graph.
        value: index of the Value; those beyond the Program's are scratch.
        value_offset_bytes: may lie outside the Value: some kernels receive such addresses.
        size_bytes: HALF_BYTES for a lower half.
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
    """How noise is recognised; the values say it in messages."""

    DIFFERS = "differs between two captures in one layout"
    HOST = "holds an address of the host's memory in every capture, which kernels cannot read"
    UPPER_HALF = "holds the upper half of an address without the lower half beside it"
    SMALL = "differs between layouts, in a single byte, too small to be an address"
    CELL = "holds an address of a random generator's state, from which nothing is drawn"


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """Uninitialised bytes.

    Attributes:
        node, part, offset_bytes: the place of the word (or half of one).
        first: its content in the capture that is executed.
        again: its replacement in the proof: the content in the other capture of its layout, and for
            other kinds of noise the address of a decoy.
        kind: how it is recognised.
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
    """A word with a constant address outside the pool, and the owner of that memory."""

    node: int
    part: int
    offset_bytes: int
    address: int
    owner: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unexplained:
    """A word that differs between captures, and is not an address that can be followed.

    It may be noise, which only another capture in the same layout could show, or an address in a
    form that is not followed.

    Attributes:
        node, part, offset_bytes: its place.
        why: names kernel, byte and values.
        advice: the remedy for the user.
    """

    node: int
    part: int
    offset_bytes: int
    why: str
    advice: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Discovery:
    """The words of the first capture's graph; those not listed are plain constants.

    Attributes:
        words: that hold addresses, by node, part and offset.
        noise: bytes without meaning.
        constants: that hold addresses which never change.
        scratch_bytes: sizes of the scratch Values that words name, which follow the Program's own.
        unexplained: words of nodes that must stay as captured.
    """

    words: tuple[Word, ...]
    noise: tuple[Noise, ...]
    constants: tuple[OwnedConstant, ...]
    scratch_bytes: tuple[int, ...]
    unexplained: tuple[Unexplained, ...] = ()


FoundWord = tuple[int, int, int, int, int, int]
"""A Word, with the allocation instead of the Value."""


def number_scratch(
    capture: GraphCapture, found: Iterable[FoundWord], n_values: int
) -> tuple[dict[int, int], tuple[int, ...]]:
    """The Value of each allocation that a word names, and the sizes of scratch allocations."""
    values: dict[int, int] = {}
    scratch_bytes: list[int] = []
    for index in sorted({allocation for _, _, _, allocation, _, _ in found}):
        allocation = capture.allocations[index]
        if allocation.value is not None:
            values[index] = allocation.value
        else:
            values[index] = n_values + len(scratch_bytes)
            scratch_bytes.append(allocation.size_bytes)
    return values, tuple(scratch_bytes)
