"""How far results of one graph lie apart that executes the same input twice, where it was captured.

Kernels that add in any order give other bits each time. What they give at other addresses cannot be
the same bits then, only as near as two plain executions are: the proof allows that much, and only
where the two have differed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from offload.backends.captured.relocation import advice
from offload.backends.captured.relocation.contents import (
    ComparedMemory,
    Kept,
    Spread,
    Stretch,
    spread,
)
from offload.errors import CaptureError

N_PLAIN = 2
"""Plain executions: the second shows whether there is anything to measure."""

N_UNSTEADY = 6
"""Plain executions where two have differed, or where a result has that was the same in both."""

_MARGIN = 8.0
"""Times the largest distance that was measured, which of few executions is not the largest."""

_MARGIN_SQUARE = 16.0
"""Times the mean square, which varies less: it tells a result whose small numbers are wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Steadiness:
    """What executions of the same input have in common.

    Attributes:
        measured: by name of what is no steady result, how far plain executions lay apart at most.
        n_executions: that were compared.
    """

    measured: Mapping[str, Spread] = dataclasses.field(default_factory=dict)
    n_executions: int = N_PLAIN

    @property
    def allowed(self) -> dict[str, Spread]:
        """By name how far apart results may be at other addresses."""
        return {
            name: Spread(_MARGIN * one.largest, _MARGIN_SQUARE * one.mean_square)
            for name, one in self.measured.items()
        }

    def notes(self) -> tuple[str, ...]:
        """What the proof allowed, in sentences for people; none where all are the same bits."""
        return tuple(
            f"{name} is other bits at each execution ({one.n_apart} numbers, by up to "
            f"{one.largest:.3g}, in {self.n_executions} executions where it was captured); the "
            f"proof allowed {_MARGIN:g} times that at other addresses, and the same bits elsewhere"
            for name, one in self.measured.items()
        )


def measure(
    memory: ComparedMemory,
    expected: Kept,
    execute_again: Callable[[], Sequence[Stretch]],
    n_plain: int,
) -> Steadiness:
    """Execute the same input where it was executed before, and compare what that gives.

    Args:
        memory: of the device.
        expected: what the first execution gave.
        execute_again: gives what another one has left.
        n_plain: executions, the first included, if they all give the same bits; else N_UNSTEADY.

    Raises:
        CaptureError: what differs are no numbers, or it differs by as much as its numbers are
            large, so that a wrong result could not be told.
    """
    measured: dict[str, Spread] = {}
    n_executions = 1
    while n_executions < (N_UNSTEADY if measured else n_plain):
        for name, one in expected.spreads(execute_again()).items():
            measured[name] = one.joined(measured.get(name, Spread()))
        n_executions += 1
    steadiness = Steadiness(measured, n_executions)
    for stretch in expected.stretches:
        if stretch.name in measured:
            _check_small(memory, stretch, steadiness.allowed[stretch.name])
    return steadiness


def _check_small(memory: ComparedMemory, stretch: Stretch, allowed: Spread) -> None:
    """Refuse distances that a wrong result could have as well."""
    zeros = memory.allocate(stretch.size_bytes)
    size = spread(memory, stretch, dataclasses.replace(stretch, address=zeros))
    memory.free(zeros)
    if allowed.mean_square < size.mean_square:  # false where some are no numbers
        return
    raise CaptureError(
        f"the captured graph computes other bits each time that it is executed, in {stretch.name}, "
        "as when an operator adds in any order, and they are too far apart to tell a wrong result "
        f"by. Whether it can be relocated cannot be proved; {advice.NOT_PROVED}"
    )
