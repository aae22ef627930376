"""The work of a promotion: what makes executables of one choice of sizes, and when it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from offload.host.promotion import Choice, Expected, Prepared
from offload.run import Executable


class NotPromoted(Exception):
    """Sizes get no executable of their own; why, for people."""


class NotNow(Exception):
    """Nothing can be prepared in this call; a later one may ask again."""


class Work(Protocol):
    """What makes executables of one choice of sizes.

    Attributes:
        expected: what that takes and saves before anything is known.
        in_turn: whether the call by which sizes are due waits for it; else a thread does it.
    """

    expected: Expected
    in_turn: bool

    def kept(self, sizes: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What of a call an executable is tried by; with memory of its own unless the call waits.

        Raises:
            NotNow: this call cannot wait for it.
        """

    def made(self, sizes: Choice, call: Any, is_wanted: Callable[[], bool]) -> tuple[Any, int]:
        """An executable that has executed a call once, and the bytes that are its own.

        Args:
            sizes: of the executable.
            call: what was kept of one.
            is_wanted: whether it still is, asked now and then; raises NotPromoted if not.
        """

    def publish(self, sizes: Choice, run: Any) -> object:
        """Let an executable take turns with the one of all sizes; what calls are given for it."""


Publish = Callable[[Choice, Executable], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Promoting:
    """How an executable of all sizes promotes.

    Attributes:
        work: what makes executables, given how they are published.
        known: what was measured before, by sizes.
    """

    work: Callable[[Publish], Work]
    known: Mapping[Choice, Prepared] = dataclasses.field(default_factory=dict)
