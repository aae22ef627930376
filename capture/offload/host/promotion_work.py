"""The work of a promotion: making executables of one choice of sizes, and its failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from offload.host.promotion import Choice, Expected, Prepared
from offload.run import Executable


class NotPromoted(Exception):
    """Sizes get no separate executable; the message says why, for people."""


class NotNow(Exception):
    """No preparation is possible in this call; a later call may ask again."""


class Work(Protocol):
    """Makes executables of one choice of sizes.

    Attributes:
        expected: the assumed cost and saving before any measurement.
        in_turn: whether the call by which sizes are due waits for the preparation; else a thread
            does it.
    """

    expected: Expected
    in_turn: bool

    def kept(self, sizes: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the call's data for the trial of an executable; copied unless the call waits.

        Raises:
            NotNow: this call cannot wait for a preparation.
        """

    def made(self, sizes: Choice, call: Any, is_wanted: Callable[[], bool]) -> tuple[Any, int]:
        """Return an executable that has executed the call once, and its own bytes.

        Args:
            sizes: of the executable.
            call: what `kept` returned.
            is_wanted: polled during the preparation; NotPromoted is raised when it is False.
        """

    def publish(self, sizes: Choice, run: Any) -> object:
        """Make it share the turns of the executable of all sizes; return what calls use."""


Publish = Callable[[Choice, Executable], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Promoting:
    """How an executable of all sizes promotes.

    Attributes:
        work: returns the maker of executables, given how they are published.
        known: earlier measurements, by sizes.
    """

    work: Callable[[Publish], Work]
    known: Mapping[Choice, Prepared] = dataclasses.field(default_factory=dict)
