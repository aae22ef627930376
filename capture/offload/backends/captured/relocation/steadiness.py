"""The distances between results of one graph that executes the same input twice, unmoved.

Kernels that add in any order give other bits each time. Their results at other addresses cannot
have the same bits then, but must be as near as those of two plain executions: the proof allows this
distance, and only where the two have differed.
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
"""Plain executions: the second shows whether there are distances to measure."""

N_UNSTEADY = 6
"""Plain executions if the first two differ, or if a result that was the same in both differs later.
"""

_MARGIN = 8.0
"""Times the largest measured distance, which a few executions underestimate."""

_MARGIN_SQUARE = 16.0
"""Times the mean square, which varies less: it detects a result whose small numbers are wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Steadiness:
    """What executions of the same input have in common.

    Attributes:
        measured: by name of a result that is not steady, the largest distances of plain executions.
        n_executions: the number of compared executions.
    """

    measured: Mapping[str, Spread] = dataclasses.field(default_factory=dict)
    n_executions: int = N_PLAIN

    @property
    def allowed(self) -> dict[str, Spread]:
        """By name the distances that results may have at other addresses."""
        return {
            name: Spread(_MARGIN * one.largest, _MARGIN_SQUARE * one.mean_square)
            for name, one in self.measured.items()
        }

    def notes(self) -> tuple[str, ...]:
        """What the proof allowed, in sentences for users; empty if all results had equal bits."""
        return tuple(
            f"{name} has different bits at each execution ({one.n_apart} numbers, by up to "
            f"{one.largest:.3g}, in {self.n_executions} executions at the captured addresses); "
            f"the proof allowed {_MARGIN:g} times that at other addresses, and required the same "
            "bits of other results"
            for name, one in self.measured.items()
        )


def measure(
    memory: ComparedMemory,
    expected: Kept,
    execute_again: Callable[[], Sequence[Stretch]],
    n_plain: int,
) -> Steadiness:
    """Execute the same input in the same place, and compare the results.

    Args:
        memory: of the device.
        expected: the result of the first execution.
        execute_again: executes again and returns the result.
        n_plain: executions, including the first, if they all give the same bits; else N_UNSTEADY.

    Raises:
        CaptureError: what differs is not numbers, or it differs by as much as its numbers, so that
            a wrong result could not be detected.
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
    if allowed.mean_square < size.mean_square:  # false if some are not numbers
        return
    raise CaptureError(
        f"the captured graph computes different bits of {stretch.name} at each execution, as when "
        "an operator adds in no fixed order, and they differ too much to detect a wrong result. "
        f"Whether it can be relocated cannot be proved; {advice.NOT_PROVED}"
    )
