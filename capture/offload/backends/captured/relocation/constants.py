"""Words that are the same in all captures: plain numbers, or addresses with an owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from offload.backends.captured.relocation import advice
from offload.backends.captured.relocation.addresses import Meanings, Owned
from offload.backends.captured.relocation.captures import GraphCapture, node_text, place_text
from offload.backends.captured.relocation.words import WORD_BYTES, OwnedConstant, words_of
from offload.errors import CaptureError

# The range of possible device addresses; beyond are numbers, floats and pairs of them.
_LEAST_ADDRESS, _MOST_ADDRESS = 1 << 16, 1 << 57


class Constants:
    """Collects constant words, and determines the owners of addresses.

    Owner: one discovery, which adds the words of every part.
    """

    def __init__(
        self,
        capture: GraphCapture,
        launch_names: Sequence[str],
        meanings: Meanings,
        owned: Owned,
    ) -> None:
        """Begin empty.

        Args:
            capture: the first, whose owners are used.
            launch_names: for messages, each launch's operator and source.
            meanings: of words, by the layouts.
            owned: the owners' ranges in that capture.
        """
        self._parts: list[tuple[int, int, bytes]] = []
        self._words: list[tuple[int, int, int, int]] = []
        self._kept: list[OwnedConstant] = []
        self._capture = capture
        self._names = launch_names
        self._meanings = meanings
        self._owned = owned

    def add_part(self, node: int, part: int, content: bytes) -> None:
        """Add all words of a part without differences."""
        self._parts.append((node, part, content))

    def add_word(self, node: int, part: int, offset: int, value: int) -> None:
        """Add a word of another part, at an offset in bytes."""
        if _LEAST_ADDRESS <= value < _MOST_ADDRESS:
            self._words.append((node, part, offset, value))

    def keep(self, word: OwnedConstant) -> None:
        """Add a word that differs in each capture, and whose owner is known."""
        self._kept.append(word)

    def owned(
        self,
        is_known_address: Callable[[int], bool] | None,
        numbers_look_alike: bool,
        describe_address: Callable[[int], str],
    ) -> Iterator[OwnedConstant]:
        """Constant words with an address that has an owner; arguments as of `discover`.

        Raises:
            CaptureError: a constant is an address without an owner.
        """
        yield from self._kept

        def is_suspect(value: int) -> bool:
            if not numbers_look_alike and self._meanings.is_of_pool(value):
                return True
            return is_known_address is not None and is_known_address(value)

        judged: dict[int, str | None] = {}
        for value in self._distinct():
            owners = self._owned.candidates(value)
            if owners:
                judged[value] = owners[0][0]
            elif is_suspect(value):
                judged[value] = None
        if not judged:
            return
        for node, part, offset, value in self._places(judged):
            owner_name = judged[value]
            if owner_name is None:
                self._refuse(node, part, offset, value, describe_address(value))
            else:
                yield OwnedConstant(node, part, offset, value, owner_name)

    def _distinct(self) -> list[int]:
        values = {value for _, _, _, value in self._words}
        for content in {content for _, _, content in self._parts}:
            values.update(words_of(content))
        return [value for value in values if _LEAST_ADDRESS <= value < _MOST_ADDRESS]

    def _places(self, values: dict[int, str | None]) -> Iterator[tuple[int, int, int, int]]:
        yield from (one for one in self._words if one[3] in values)
        for node, part, content in self._parts:
            words = words_of(content)
            if not values.keys().isdisjoint(words):
                for index, value in enumerate(words):
                    if value in values:
                        yield node, part, index * WORD_BYTES, value

    def _refuse(self, node: int, part: int, offset: int, value: int, described: str) -> NoReturn:
        place = place_text(self._capture, node, part, offset)
        if self._meanings.is_of_pool(value):
            what_to_do = advice.ALLOCATE_EACH_TIME
            why = (
                "memory of one capture, which is freed after it: something keeps that address "
                "between calls (a cache, or a plan of a library)"
            )
        else:
            what_to_do = advice.HOLD_IT
            why = (
                "memory that neither the Program nor a known library owns, so its lifetime and "
                "its writers are not known (a library's handle or plan, for example)"
            )
        raise CaptureError(
            f"{node_text(self._capture, self._names, node)}: {place} is always {described}, an "
            f"address of {why}: expected memory of inputs, results or weights, or what the launch "
            f"itself allocates; {what_to_do}"
        )
