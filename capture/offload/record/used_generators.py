"""The generators that launches of a recorded call draw from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload.errors import CaptureError
from offload.record.operators import user_location


class UsedGenerators:
    """Generators that were known before the call, in the order in which they were noted.

    Owner: one LaunchRecorder. Iterating gives each with the state that it had at first sight.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[torch.Generator, torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[torch.Generator, torch.Tensor]]:
        return iter(self._noted)

    def check(self, generator: torch.Generator, name: str) -> None:
        """Refuse a generator that nobody knew before the call.

        Args:
            generator: that a launch is given.
            name: of its operator.

        Raises:
            CaptureError: the call has made it, and a replay would draw on from it.
        """
        if all(_identity(known) != _identity(generator) for known, _ in self._noted):
            raise CaptureError(
                f"{user_location()}: {name} draws from a torch.Generator that the call made, whose "
                "numbers a replay would not begin anew: pass it as an argument, or let the model "
                "hold it"
            )

    def note(self, generator: torch.Generator) -> int:
        """The position of a generator among those used, its state kept at first sight."""
        for position, (known, _) in enumerate(self._noted):
            if _identity(known) == _identity(generator):
                return position
        self._noted.append((generator, generator.get_state()))
        return len(self._noted) - 1


def _identity(generator: torch.Generator) -> int:
    """What stays the same while each operator is given another Python object."""
    identity: int = generator._cdata  # type: ignore[attr-defined]
    return identity
