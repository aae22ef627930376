"""Words that are the same in all captures: numbers, and addresses that somebody has to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from offload.backends.relocation import advice
from offload.backends.relocation.addresses import Layout, Owned
from offload.backends.relocation.captures import GraphCapture, node_text, place_text
from offload.backends.relocation.words import WORD_BYTES, OwnedConstant, words_of
from offload.errors import CaptureError

# What may be a device's address at all; beyond are numbers, floats and pairs of them.
_LEAST_ADDRESS, _MOST_ADDRESS = 1 << 16, 1 << 57


class ConstantWords:
    """The constant words of a graph, of which those that are addresses need an owner.

    Owner: one discovery, which adds the words of every part.
    """

    def __init__(
        self,
        capture: GraphCapture,
        layouts: Sequence[Layout],
        owned: Owned,
        launch_names: Sequence[str],
    ) -> None:
        """Begin with none.

        Args:
            capture: any of those that are compared, for messages.
            layouts: of the allocations of each; a constant address in one is of memory that has
                gone.
            owned: what somebody keeps.
            launch_names: for messages, each launch's operator and source.
        """
        self._capture = capture
        self._layouts = layouts
        self._owned = owned
        self._names = launch_names
        self._parts: list[tuple[int, int, bytes]] = []
        self._words: list[tuple[int, int, int, int]] = []

    def add_part(self, node: int, part: int, content: bytes) -> None:
        """Add all words of a part in which nothing differs."""
        self._parts.append((node, part, content))

    def add_word(self, node: int, part: int, offset: int, value: int) -> None:
        """Add a word of another part, at an offset in bytes."""
        if _LEAST_ADDRESS <= value < _MOST_ADDRESS:
            self._words.append((node, part, offset, value))

    def owned(
        self,
        is_known_address: Callable[[int], bool] | None,
        numbers_look_alike: bool,
        describe_address: Callable[[int], str],
    ) -> Iterator[OwnedConstant]:
        """Those with an address that somebody keeps. The arguments are those of `discover`.

        Raises:
            CaptureError: a constant is an address that nobody keeps.
        """

        def is_suspect(value: int) -> bool:
            if not numbers_look_alike and self._is_of_pool(value):
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

    def _is_of_pool(self, value: int) -> bool:
        return any(layout.candidates(value) for layout in self._layouts)

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
        where = node_text(self._capture, self._names, node)
        place = place_text(self._capture, node, part, offset)
        if self._is_of_pool(value):
            what_to_do = advice.ALLOCATE_EACH_TIME
            why = (
                "memory of one capture, which is gone after it: something keeps that address "
                "between calls (a cache, or a plan of a library)"
            )
        else:
            what_to_do = advice.HOLD_IT
            why = (
                "memory that neither the Program nor a known library owns, so nobody says how long "
                "it lives, or who writes it meanwhile (a library's handle or plan, say)"
            )
        raise CaptureError(
            f"{where}: {place} is always {described}, an address of {why}: "
            "expected memory of inputs, results or weights, or what the launch itself allocates; "
            f"{what_to_do}"
        )
