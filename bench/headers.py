"""Times headers: m_l_t of executions whose tensors stay, or move each time."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import offload

EXECUTIONS = 40
"""Executions per turn; half of them at each of two sets of addresses, if tensors move."""


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """The tensors of one execution; without `out` its results are fresh."""

    inputs: Sequence[torch.Tensor]
    out: torch.Tensor | list[torch.Tensor] | None
    feature_map: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """An executable, and the sets of tensors that its executions take in turns.

    `before` runs before each execution: it determines the content of the processor's caches.
    """

    run: offload.Executable
    sets: Sequence[Addresses]
    before: Callable[[], Any] | None = None

    def execute(self, index: int) -> Any:
        """Execute with the current set, and return the result."""
        if self.before is not None:
            self.before()
        given = self.sets[index % len(self.sets)]
        return self.run(*given.inputs, out=given.out, feature_map=given.feature_map)

    def m_l_t_ns(self, index: int) -> int:
        """Return m_l_t of an execution with the current set."""
        self.execute(index)
        return self.run.last_execution.m_l_t_ns


def executable(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> offload.Executable:
    """Capture a function and load it."""
    with offload.capture(function) as captured:
        captured(*inputs)
    return captured.load()


def check(header: Header, expected: Any, slots_changed: int | None = None) -> None:
    """Before timing, check that results are right and exactly this many slots move each time."""
    for index in range(2 * len(header.sets) + 1):
        torch.testing.assert_close(header.execute(index), expected)
        found = header.run.last_execution.slots_changed
        if slots_changed is not None and index >= len(header.sets):
            assert found == slots_changed, f"{found} slots changed, expected {slots_changed}"


def m_l_t_in_turns(headers: Mapping[str, Header], rounds: int = 40) -> dict[str, list[float]]:
    """Return for each header and round the median m_l_t of a turn's executions, in ns."""
    times: dict[str, list[float]] = {name: [] for name in headers}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(sorted(headers), len(headers)):
            header = headers[name]
            header.execute(1)
            found = [header.m_l_t_ns(index) for index in range(EXECUTIONS)]
            times[name].append(statistics.median(found))
    return times
