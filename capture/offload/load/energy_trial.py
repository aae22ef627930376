"""Hold the slowdown that saving energy may cost by what calls are measured to take."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from offload.errors import OutOfMemory, PlanError
from offload.load.device_options import DeviceOptions
from offload.load.fitted_placement import FittedPlacement
from offload.load.placed_segments import CannotRun
from offload.plan.program_tasks import ProgramTasks
from offload.plan.task_placement import Objective, TaskPlacement
from offload.run.placed_executable import PlacedExecutable

# A measured slowdown may exceed its limit by this factor: medians of equal calls differ by less.
_TOLERANCE = 1.03

Costs = Sequence[Sequence[float | None]]
"""By device, the cost of each launch; None: it cannot run there."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedPlacement:
    """A placement for the least energy, and its executable.

    Attributes:
        tasks: what was placed.
        placement: of the tasks.
        run: its executable, whose calls are timed.
    """

    tasks: ProgramTasks
    placement: TaskPlacement
    run: PlacedExecutable


class EnergyTrial:
    """Measures placements of one Program. Owner: one load."""

    def __init__(
        self,
        fitting: Callable[[DeviceOptions], FittedPlacement],
        make: Callable[[ProgramTasks, TaskPlacement], PlacedExecutable],
        times_ns: Callable[[Sequence[PlacedExecutable]], Sequence[float]],
        asked: DeviceOptions,
    ) -> None:
        """Prepare without measuring.

        Args:
            fitting: places for an objective within a slowdown.
            make: loads a placement.
            times_ns: the times of calls of executables.
            asked: the objective, which is energy, and its slowdown.
        """
        self._fitting, self._make, self._times_ns = fitting, make, times_ns
        self._asked = asked

    def chosen(
        self,
        run: PlacedExecutable,
        tasks: ProgramTasks,
        costs_ns: Costs,
        singles: Sequence[Sequence[int]],
    ) -> tuple[ProgramTasks, TaskPlacement, str]:
        """The placement of the least predicted energy among those measured to be quick enough.

        Calls of the given placement are timed in turns with those of the least predicted latency
        and of single devices: the least time is the reference. Where they exceed the slowdown, the
        Program is placed once more, with a limit that is smaller by as much as the measured
        slowdown exceeds the predicted one.

        Args:
            run: of the least energy, by prediction.
            tasks: those of its placement.
            costs_ns: of launches.
            singles: the device of each launch in placements on single devices.

        Returns:
            The tasks, their placement, and a sentence for the user.
        """
        with contextlib.ExitStack() as made:
            measured = [LoadedPlacement(tasks, run.placement, run)]
            for where in (self._least_latency(costs_ns), *singles):
                if self._add(measured, costs_at(costs_ns, where), self._asked, made):
                    placement = as_measured(measured[-1].placement, run.placement)
                    measured[-1] = dataclasses.replace(measured[-1], placement=placement)
            times_ns = self._times_ns([one.run for one in measured])
            max_slowdown = self._asked.max_slowdown or 1.0
            slowdown = times_ns[0] / min(times_ns)
            note = (
                f"measured at the load: calls take {times_ns[0] / 1e3:,.0f} us with the least "
                f"energy, {slowdown:.2f} times the least time, of at most {max_slowdown:.2f}"
            )
            if slowdown <= max_slowdown * _TOLERANCE:
                return tasks, run.placement, note
            least_ns = min(one.placement.latency_ns for one in measured)
            predicted = run.placement.latency_ns / max(1, least_ns)
            limit = max(1.0, max_slowdown * predicted / slowdown)
            asked = dataclasses.replace(self._asked, max_slowdown=limit)
            if self._add(measured, costs_ns, asked, made):
                times_ns = self._times_ns([one.run for one in measured])
            found, chosen_ns = _least_energy(measured, times_ns, max_slowdown)
            return (
                found.tasks,
                found.placement,
                f"{note}: so the placement is another one, of {chosen_ns / 1e3:,.0f} us and "
                f"{chosen_ns / min(times_ns):.2f} times the least time",
            )

    def _least_latency(self, costs_ns: Costs) -> list[int]:
        """The device of each launch where the predicted latency is least."""
        asked = dataclasses.replace(self._asked, objective=Objective.LATENCY, max_slowdown=None)
        tasks, placement = self._fitting(asked).fitted(costs_ns)
        where = [0] * len(costs_ns[0])
        for launches, device in zip(tasks.launches, placement.processors, strict=True):
            for launch in launches:
                where[launch] = device
        return where

    def _add(
        self,
        measured: list[LoadedPlacement],
        costs_ns: Costs,
        asked: DeviceOptions,
        made: contextlib.ExitStack,
    ) -> bool:
        """Place and load; whether that is possible, and no placement that is there already."""
        with contextlib.suppress(PlanError, CannotRun, OutOfMemory):
            tasks, placement = self._fitting(asked).fitted(costs_ns)
            if all(one.placement.processors != placement.processors for one in measured):
                run = self._make(tasks, placement)
                made.callback(run.close)
                measured.append(LoadedPlacement(tasks, placement, run))
                return True
        return False


def _least_energy(
    measured: Sequence[LoadedPlacement], times_ns: Sequence[float], max_slowdown: float
) -> tuple[LoadedPlacement, float]:
    """The placement of the least predicted energy that is quick enough, and its time."""
    limit_ns = max_slowdown * _TOLERANCE * min(times_ns)
    able = [
        (one.placement.energy_nj, ns, at)
        for at, (one, ns) in enumerate(zip(measured, times_ns, strict=True))
        if ns <= limit_ns
    ]
    _, chosen_ns, at = min(able)
    return measured[at], chosen_ns


def costs_at(costs_ns: Costs, where: Sequence[int]) -> list[list[float | None]]:
    """The costs of launches if each may run on one device alone."""
    return [
        [cost if at == device else None for cost, at in zip(costs, where, strict=True)]
        for device, costs in enumerate(costs_ns)
    ]


def as_measured(placement: TaskPlacement, planned: TaskPlacement) -> TaskPlacement:
    """A placement for costs of `costs_at`, with the costs and bounds among which it was chosen.

    Without them it would seem that no other device can run the tasks.

    Args:
        placement: chosen by measurement, in place of the planned one.
        planned: the result of the planner, for the costs on all devices.
    """
    tasks = tuple(
        dataclasses.replace(one, costs_ns=among.costs_ns)
        for one, among in zip(placement.graph.tasks, planned.graph.tasks, strict=True)
    )
    limit_ns = planned.latency_limit_ns
    return dataclasses.replace(
        placement,
        graph=dataclasses.replace(placement.graph, tasks=tasks),
        lower_bound=planned.lower_bound,
        method="measurement",
        n_evaluations=planned.n_evaluations,
        latency_limit_ns=None if limit_ns is None else max(limit_ns, placement.latency_ns),
        candidates=planned.candidates,
    )
