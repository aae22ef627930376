"""Simulates the duration of Steps. The work is done in native/plan/simulate_steps.cpp."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.native import _planner
from offload.plan.steps import Copy, Lane, Record, Run, Step, n_copied_ahead

_RUN, _COPY, _RECORD, _WAIT = _planner.STEP_KINDS


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedExecution:
    """One execution in the steady state.

    Times are in ns from the end of the previous execution's last launch, so copies made ahead for
    this execution may begin before zero.

    Attributes:
        period_ns: when its last launch ends.
        launch_begin_ns, launch_end_ns: of each launch.
        copy_begin_ns, copy_end_ns: of each copy whose bytes its launches read, lane by lane in the
            order of the copies: first those made ahead.
    """

    period_ns: float
    launch_begin_ns: tuple[float, ...]
    launch_end_ns: tuple[float, ...]
    copy_begin_ns: tuple[float, ...]
    copy_end_ns: tuple[float, ...]

    @property
    def wait_ns(self) -> tuple[float, ...]:
        """For each of consecutive launches, its wait after the end of the previous launch."""
        ends = (0.0, *self.launch_end_ns)
        return tuple(begin - end for begin, end in zip(self.launch_begin_ns, ends, strict=False))


def simulate_steps(
    lanes: Sequence[Lane], launch_ns: Sequence[float], copy_ns: Sequence[float]
) -> SimulatedExecution:
    """Simulate executions until two in a row take the same time: at least three, at most sixteen.

    Args:
        lanes: any, on one Machine or several.
        launch_ns: the duration of each launch.
        copy_ns: the duration of a copy of each piece.

    Raises:
        PlanError: a step names something that does not exist, a launch is run twice, or lanes wait
            for one another.
    """
    steps = [[_fields(one) for one in lane.steps] for lane in lanes]
    period_ns, launch_begin, launch_end, *copies = _planner.simulate_steps(
        steps, launch_ns, copy_ns
    )
    in_order = _ahead_first(lanes)
    copy_begin, copy_end = (tuple(one[index] for index in in_order) for one in copies)
    return SimulatedExecution(
        period_ns, tuple(launch_begin), tuple(launch_end), copy_begin, copy_end
    )


def _ahead_first(lanes: Sequence[Lane]) -> list[int]:
    """Positions of copies, those made ahead first, numbered as in their lanes."""
    found: list[int] = []
    for lane in lanes:
        behind, n_ahead = range(len(found), len(found) + len(lane.copies)), n_copied_ahead([lane])
        first = behind[len(behind) - n_ahead :]
        found += [*first, *behind[: len(behind) - n_ahead]]
    return found


def _fields(step: Step) -> tuple[int, int, int]:
    if isinstance(step, Run):
        return _RUN, step.first, step.last
    if isinstance(step, Copy):
        return _COPY, step.piece, step.ahead
    if isinstance(step, Record):
        return _RECORD, step.event, 0
    return _WAIT, step.event, step.age
