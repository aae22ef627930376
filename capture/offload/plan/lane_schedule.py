"""Puts the launches of a Program on lanes. The work is done in native/plan/lane_schedule.cpp."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence

from offload.errors import PlanError
from offload.native import _planner
from offload.plan.launch_conflicts import Conflict
from offload.plan.simulate_steps import simulate_steps
from offload.plan.steps import Lane, LaneKind, Record, Run, Step, Wait, launch_lane


def default_lane_evaluations(n_launches: int) -> int:
    """The default number of evaluations: a thousand launches take ten milliseconds."""
    most = _planner.DEFAULT_PLACED_LAUNCHES // max(1, n_launches)
    return min(_planner.DEFAULT_LANE_EVALUATIONS, most)


@dataclasses.dataclass(frozen=True, slots=True)
class LaneSchedule:
    """Launches on lanes, each lane's in recorded order, and the waits between lanes.

    An execution begins when the previous one has ended: the first lane waits for the others at its
    end, and the others wait for that at their beginning, unless waits between launches already
    order them.

    Attributes:
        lanes: the steps of each used lane.
        lane_of: of each launch.
        n_waits: waits of an execution for launches of another lane: as few as the lanes allow.
        n_boundary_waits: further waits between one execution and the next.
        predicted_ns: of an execution, by simulation of its steps; a wait costs the waiting lane
            `synchronisation_ns`.
        sequential_ns: of all launches on one lane.
        lower_bound_ns: no assignment to lanes takes less.
        method: how it was found: `one lane`, a list, or `search`.
        n_evaluations: of the search.
    """

    lanes: tuple[Lane, ...]
    lane_of: tuple[int, ...]
    n_waits: int
    n_boundary_waits: int
    predicted_ns: float
    sequential_ns: float
    lower_bound_ns: float
    method: str
    n_evaluations: int


def schedule_lanes(
    launch_ns: Sequence[float],
    conflicts: Iterable[Conflict],
    n_lanes: int,
    *,
    synchronisation_ns: float = 0.0,
    max_evaluations: int | None = None,
) -> LaneSchedule:
    """Assign each launch to one of several lanes, so that an execution ends early.

    Tries one lane and list schedules, then other lanes for launches on the critical path. The
    search is counted, never timed. The prediction is never longer than that of one lane.

    Args:
        launch_ns: the duration of each launch.
        conflicts: pairs of a launch and a later one that keep their order, as from
            `launch_conflicts`.
        n_lanes: the most lanes to use, 1 to 64.
        synchronisation_ns: the cost of a wait for another lane.
        max_evaluations: assignments that the search may try; None: `default_lane_evaluations`.

    Raises:
        PlanError: a duration is negative or not finite, a conflict is not a pair of a launch and a
            later one, or the number of lanes or evaluations is out of range.
    """
    pairs = [number for one in conflicts for number in one]
    if max_evaluations is None:
        max_evaluations = default_lane_evaluations(len(launch_ns))
    try:
        columns = array("q", pairs)
        lane_of, waits, joined, held, _, lower_bound_ns, method, n_evaluations = (
            _planner.schedule_lanes(
                launch_ns,
                columns,
                n_lanes=n_lanes,
                synchronisation_ns=synchronisation_ns,
                max_evaluations=max_evaluations,
            )
        )
    except (OverflowError, TypeError):
        raise PlanError(
            "expected durations as numbers, conflicts of two launches, and numbers below 2^63"
        ) from None
    steps = _LaneSteps(lane_of, waits, joined, held)
    lanes = steps.lanes()
    n_waiting = steps.n_waiting
    costs_ns = [
        cost_ns + synchronisation_ns * count
        for cost_ns, count in zip(launch_ns, n_waiting, strict=True)
    ]
    predicted_ns = simulate_steps(lanes, costs_ns, ()).period_ns
    return LaneSchedule(
        lanes=lanes,
        lane_of=tuple(lane_of),
        n_waits=len(waits),
        n_boundary_waits=len(joined) + len(held),
        predicted_ns=predicted_ns + synchronisation_ns * len(joined),
        sequential_ns=float(sum(launch_ns)),
        lower_bound_ns=lower_bound_ns,
        method=method,
        n_evaluations=n_evaluations,
    )


_NOTHING = -1


class _LaneSteps:
    """The steps of lanes, made from waits."""

    def __init__(
        self,
        lane_of: Sequence[int],
        waits: Sequence[tuple[int, int]],
        joined: Sequence[int],
        held: Sequence[int],
    ) -> None:
        self._lane_of = lane_of
        self._joined = joined
        self._held = frozenset(held)
        self._waits: dict[int, list[int]] = {}
        for launch, ended in waits:
            self._waits.setdefault(launch, []).append(ended)
        ends = sorted({*(ended for _, ended in waits), *joined})
        self._events = {launch: event for event, launch in enumerate(ends)}
        self._end = len(ends)
        self._n_lanes = max(lane_of, default=0) + 1
        self.n_waiting = [len(self._waits.get(launch, ())) for launch in range(len(lane_of))]

    def lanes(self) -> tuple[Lane, ...]:
        """The lanes; `n_waiting` then includes waits at the beginning of lanes."""
        if self._n_lanes == 1:
            return (launch_lane(len(self._lane_of)),)
        steps: list[list[Step]] = [[] for _ in range(self._n_lanes)]
        begins = [_NOTHING] * self._n_lanes  # of a run that continues up to the launch in `ends`
        ends = [_NOTHING] * self._n_lanes
        for lane in self._held:
            steps[lane].append(Wait(self._end, age=1))
            self.n_waiting[self._lane_of.index(lane)] += 1
        for launch, lane in enumerate(self._lane_of):
            row, begin, waits = steps[lane], begins[lane], self._waits.get(launch)
            if begin != _NOTHING and (waits or ends[lane] != launch):
                row.append(Run(begin, ends[lane]))
                begin = _NOTHING
            if waits:
                row += [Wait(self._events[ended]) for ended in waits]
            if launch in self._events:
                row.append(Run(launch if begin == _NOTHING else begin, launch + 1))
                row.append(Record(self._events[launch]))
                begins[lane] = _NOTHING
            else:
                begins[lane] = launch if begin == _NOTHING else begin
                ends[lane] = launch + 1
        for row, begin, end in zip(steps, begins, ends, strict=True):
            if begin != _NOTHING:
                row.append(Run(begin, end))
        steps[0].extend(Wait(self._events[ended]) for ended in self._joined)
        if self._held:
            steps[0].append(Record(self._end))
        return tuple(Lane(LaneKind.LAUNCHES, tuple(row)) for row in steps)
