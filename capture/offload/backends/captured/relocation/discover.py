"""Determines which words of a captured graph hold which address, from captures in several layouts.

A word is eight bytes of a kernel's arguments, of a copy's or memset's operands, or of a host table
that a copy reads. Pure data: nothing here needs a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.backends.captured.relocation.addresses import Meanings, Owned
from offload.backends.captured.relocation.alike import check_alike
from offload.backends.captured.relocation.captures import GraphCapture, NodeKind
from offload.backends.captured.relocation.constants import Constants
from offload.backends.captured.relocation.stale_words import (
    StaleWords,
    bytes_follow_layout,
    differs_beside,
    follows_layout,
)
from offload.backends.captured.relocation.word_refusals import WordRefusals
from offload.backends.captured.relocation.words import (
    HALF_BYTES,
    WORD_BYTES,
    Discovery,
    FoundWord,
    Noise,
    NoiseKind,
    OwnedConstant,
    Unexplained,
    Unfollowed,
    Word,
    number_scratch,
    words_of,
)

GUARD_BYTES = 1 << 20
"""An allocation owns the addresses up to this distance around it: the discovery pool leaves at
least this many bytes free on both sides.
"""


def discover(
    captures: Sequence[GraphCapture],
    n_values: int,
    launch_names: Sequence[str] = (),
    is_known_address: Callable[[int], bool] | None = None,
    *,
    describe_address: Callable[[int], str] = hex,
    guard_bytes: int = GUARD_BYTES,
    numbers_look_alike: bool = False,
    leaves_unexplained: bool = False,
    decoy_address: int = 0,
) -> Discovery:
    """Name every word of a captured graph.

    Args:
        captures: four of one Program: two in one layout, and two in others. A word that is one
            allocation plus one offset in the three layouts is an address. What differs between the
            two captures of one layout is noise, except what shares a word with it and differs in
            other layouts.
        n_values: of the Program; scratch Values are numbered from here.
        launch_names: for messages, each launch's operator and source.
        is_known_address: asks the driver about a constant without an owner; None trusts it.
        describe_address: the driver's information about such a constant, for messages.
        guard_bytes: the distance around itself up to which an allocation owns addresses. 0:
            allocations may be adjacent, and the address one past the end is the next one's.
        numbers_look_alike: arguments hold numbers that may look like any address, so a constant is
            trusted even if it is an address of some capture's memory. It names none of the memory
            that it was launched on: that differs between captures. The proof shows whether it names
            memory of another capture that something keeps.
        leaves_unexplained: a word that differs and is not an address of an allocation is listed
            with its node, which must stay as captured; otherwise it is an error.
        decoy_address: of device memory; the proof sets it in place of host addresses, which are
            noise if all captures have one (`stale_words`).

    Raises:
        CapturesDiffer: the captures are not of the same graph, or not in such layouts.
        CaptureError: a word differs and is not an address of an allocation, or is an address
            without an owner; the message names kernel, parameter and values.
    """
    check_alike(captures, launch_names)
    search = _Search(captures, launch_names, guard_bytes, leaves_unexplained, decoy_address)
    search.read_parts()
    constants = search.constants.owned(is_known_address, numbers_look_alike, describe_address)
    values, scratch_bytes = number_scratch(captures[0], search.found, n_values)
    return Discovery(
        tuple(
            Word(node, part, offset, values[allocation], address_offset, size_bytes)
            for node, part, offset, allocation, address_offset, size_bytes in sorted(search.found)
        ),
        tuple(search.noise),
        tuple(constants),
        scratch_bytes,
        tuple(search.unexplained),
    )


class _Search:
    """The comparison of four captures, part by part and word by word."""

    def __init__(
        self,
        captures: Sequence[GraphCapture],
        launch_names: Sequence[str],
        guard_bytes: int,
        leaves_unexplained: bool,
        decoy_address: int,
    ) -> None:
        self._captures = captures
        self._nodes = captures[0].nodes
        first, _, second, third = captures
        self._meanings = Meanings((first, second, third), guard_bytes)
        self._halves_tell = guard_bytes > 0
        self._owned = [Owned(capture.owned) for capture in captures]
        self._stale = StaleWords(captures, self._meanings, self._owned, decoy_address)
        self._refusals = WordRefusals(captures[0], launch_names, self._meanings, self._halves_tell)
        self.constants = Constants(captures[0], launch_names, self._meanings, self._owned[0])
        self.found: list[FoundWord] = []
        self.noise: list[Noise] = []
        self.unexplained: list[Unexplained] = []
        self._leaves_unexplained = leaves_unexplained

    def read_parts(self) -> None:
        for node, one in enumerate(self._nodes):
            if one.declared is not None:
                self._read_declared(node, one.declared)
                continue
            for part, content in enumerate(one.parts):
                contents = [capture.nodes[node].parts[part] for capture in self._captures]
                if all(other == content for other in contents):
                    self.constants.add_part(node, part, content)
                else:
                    self._read_part(node, part, contents)

    def _read_declared(self, node: int, addresses: Sequence[int]) -> None:
        """Name the addresses of a kernel that was launched with known arguments.

        Its other arguments are numbers, whatever they look like.
        """
        contents = [capture.nodes[node].parts[0] for capture in self._captures]
        taken = {at for offset in addresses for at in range(offset, offset + WORD_BYTES)}
        for at in range(len(contents[0])):
            if at not in taken and len({content[at] for content in contents}) > 1:
                word = at - at % WORD_BYTES
                words = [content[word : word + WORD_BYTES] for content in contents]
                self._refusals.differing(node, 0, word, "is a number of its launch", words)
        for offset in addresses:
            meanings = self._meanings.at(offset, contents)
            if not meanings:
                words = [content[offset : offset + WORD_BYTES] for content in contents]
                self._refusals.differing(node, 0, offset, "is not an address of its launch", words)
            self._note(node, 0, offset, meanings)

    def _read_part(self, node: int, part: int, contents: list[bytes]) -> None:
        n_found, n_noise, n_bytes = len(self.found), len(self.noise), len(contents[0])
        columns = list(zip(*map(words_of, contents), strict=True))
        is_constant = [words.count(words[0]) == len(words) for words in columns]
        addresses = self._read_whole(node, part, columns, is_constant)
        differ = [
            index * WORD_BYTES
            for index, same in enumerate(is_constant)
            if not same and index * WORD_BYTES not in addresses
        ]
        rest = len(columns) * WORD_BYTES
        if any(content[rest:] != contents[0][rest:] for content in contents):
            differ.append(rest)
        between = self._read_between(node, part, contents, differ, addresses)
        for index, words in enumerate(columns):
            begin = index * WORD_BYTES
            if is_constant[index] and between.isdisjoint((begin, begin + HALF_BYTES)):
                self.constants.add_word(node, part, begin, words[0])
        for offset in differ:
            middle, end = offset + HALF_BYTES, min(n_bytes, offset + WORD_BYTES)
            begin = middle if offset in between else offset
            end = middle if middle in between else end  # the remainder of the word
            left = {content[begin:end] for content in contents}
            if len(left) > 1:
                self._read_differing(node, part, begin, end, contents)
        try:
            self._refusals.check_pieces(node, self.found[n_found:], self.noise[n_noise:])
        except Unfollowed as error:
            self._leave(node, part, 0, error)

    def _read_whole(
        self,
        node: int,
        part: int,
        columns: Sequence[tuple[int, ...]],
        is_constant: Sequence[bool],
    ) -> set[int]:
        """Name whole words that are addresses of the pool; returns their places."""
        addresses: set[int] = set()
        for index, (first, _, second, third) in enumerate(columns):
            # Whatever the second capture in the first layout holds there: noise can be relocated
            # too.
            meanings = [] if is_constant[index] else self._meanings.of(first, second, third)
            if meanings:
                addresses.add(index * WORD_BYTES)
                try:
                    self._note(node, part, index * WORD_BYTES, meanings)
                except Unfollowed as error:
                    self._leave(node, part, index * WORD_BYTES, error)
        return addresses

    def _read_between(
        self,
        node: int,
        part: int,
        contents: list[bytes],
        differ: Sequence[int],
        addresses: set[int],
    ) -> set[int]:
        """Name addresses that begin in the middle of a word; return the halves of words they take.

        As in structures of four-byte numbers, which are aligned to four. At least one of the two
        words differs, and neither is in `addresses` as a whole.
        """
        is_kernel = self._nodes[node].kind is NodeKind.KERNEL
        taken: set[int] = set()
        if not self._halves_tell or not (is_kernel or part):
            return taken
        starts = {at + lead for at in differ for lead in (-HALF_BYTES, HALF_BYTES)}
        for start in sorted(starts):
            words = [content[start : start + WORD_BYTES] for content in contents]
            if start < 0 or len(words[0]) < WORD_BYTES or words.count(words[0]) == len(words):
                continue
            if not addresses.isdisjoint((start - HALF_BYTES, start + HALF_BYTES)):
                continue
            meanings = self._meanings.at(start, contents) if words[0] == words[1] else []
            is_host = is_kernel and not part and self._stale.is_host_address(contents, start)
            if not (meanings or is_host) or self._is_claimed(start, contents):
                continue
            if meanings:
                self._note(node, part, start, meanings)
            else:
                self.noise.append(
                    Noise(node, part, start, words[0], self._stale.decoy, NoiseKind.HOST)
                )
            taken.update((start, start + HALF_BYTES))
        if is_kernel and not part:
            taken |= self._read_lower_halves(node, contents, differ, taken)
        return taken

    def _read_lower_halves(
        self, node: int, contents: list[bytes], differ: Sequence[int], taken: set[int]
    ) -> set[int]:
        """Name lower halves of addresses that stand alone, or remain of stale addresses.

        They are followed in either case, as a stale one is not read. What was written over the
        lowest byte stays, since addresses move by multiples of 256 bytes.
        """
        found: set[int] = set()
        for begin in (at + lead for at in differ for lead in (0, HALF_BYTES)):
            halves = [content[begin : begin + HALF_BYTES] for content in contents]
            if begin in taken or len(halves[0]) < HALF_BYTES or not follows_layout(halves):
                continue
            meanings = self._meanings.of_lower_half(*(_number(halves[one]) for one in (0, 2, 3)))
            if meanings and not self._is_kept(begin - begin % WORD_BYTES, contents):
                self._note(node, 0, begin, meanings, HALF_BYTES)
                found.add(begin)
        return found

    def _note(
        self,
        node: int,
        part: int,
        offset: int,
        meanings: list[tuple[int, int]],
        size_bytes: int = WORD_BYTES,
    ) -> None:
        nearest = self._nearest(node, offset, meanings)
        self.found.append((node, part, offset, *nearest, size_bytes))

    def _is_claimed(self, start: int, contents: list[bytes]) -> bool:
        """Whether a word with a half of these eight bytes is an owner's or the host's address."""
        return any(
            self._is_kept(offset, contents) for offset in (start - HALF_BYTES, start + HALF_BYTES)
        )

    def _is_kept(self, offset: int, contents: list[bytes]) -> bool:
        """Whether a whole word that differs is an address of an owner's or the host's memory."""
        words = [content[offset : offset + WORD_BYTES] for content in contents]
        if len(words[0]) < WORD_BYTES or words.count(words[0]) == len(words):
            return False
        return bool(self._owner_of(words) or self._stale.is_host_address(contents, offset))

    def _read_differing(
        self, node: int, part: int, begin: int, end: int, contents: list[bytes]
    ) -> None:
        try:
            self._read_other(node, part, begin, end, contents)
        except Unfollowed as error:
            self._leave(node, part, begin, error)

    def _leave(self, node: int, part: int, offset: int, error: Unfollowed) -> None:
        """Leave a word unexplained, if that is enabled."""
        if not self._leaves_unexplained:
            raise error
        self.unexplained.append(Unexplained(node, part, offset, error.what, error.advice))

    def _read_other(
        self, node: int, part: int, begin: int, end: int, contents: list[bytes]
    ) -> None:
        """Name a word that differs and is not an address in the pool, or the remainder of one."""
        words = [content[begin:end] for content in contents]
        first, again = words[:2]
        owner = self._owner_of(words) if len(first) == WORD_BYTES else ""
        if owner:
            self.constants.keep(OwnedConstant(node, part, begin, _number(first), owner))
            return
        if bytes_follow_layout(words):
            self._refusals.check_aligned(node, begin, contents)
        if first == again or (differs_beside(words) and not self._is_stale(words)):
            is_kernel = self._nodes[node].kind is NodeKind.KERNEL and not part
            parameters = self._nodes[node].parameters
            replaced = (  # copies and memsets use every byte
                self._stale.replaced(contents, begin, end, parameters)
                if is_kernel and self._halves_tell
                else None
            )
            if replaced is None:
                what = "is not an address of an allocation in each of them"
                self._refusals.differing(node, part, begin, what, words)
            self.noise.append(Noise(node, part, begin, first, *replaced))
            return
        if self._nodes[node].kind is not NodeKind.KERNEL and not part:
            self._refusals.differing(
                node, part, begin, "is an operand, which is always used", words
            )
        self.noise.append(Noise(node, part, begin, first, again))

    def _is_stale(self, words: Sequence[bytes]) -> bool:
        """Whether both captures of the first layout hold some address of that layout in a word."""
        return all(self._meanings.layouts[0].candidates(_number(word)) for word in words[:2])

    def _nearest(self, node: int, offset: int, meanings: list[tuple[int, int]]) -> tuple[int, int]:
        """The allocation that is nearest to an address."""
        allocations = self._captures[0].allocations
        order = sorted(
            (max(-distance, distance - allocations[index].size_bytes, 0), index, distance)
            for index, distance in meanings
        )
        if len(order) > 1 and order[0][0] == order[1][0]:
            self._refusals.equally_near(node, offset)
        return order[0][1:]

    def _owner_of(self, words: Sequence[bytes]) -> str:
        """The owner of a word's target, if it is the same place of one owner in each capture."""
        common = self._owned[0].candidates(_number(words[0]))
        for owned, word in zip(self._owned[1:], words[1:], strict=True):
            if not common:  # the case of most words
                return ""
            others = owned.candidates(_number(word))
            common = [one for one in common if one in others]
        return common[0][0] if common else ""


def _number(word: bytes) -> int:
    return int.from_bytes(word, "little")
