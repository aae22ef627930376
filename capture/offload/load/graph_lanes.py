"""`load(lanes=)`: launches on several lanes inside a device's own graph."""

from __future__ import annotations

import dataclasses

from offload.backends import Backend, Prepared
from offload.backends.base import LaneRunner
from offload.console.progress import stage
from offload.costs import LaunchCosts
from offload.errors import (
    BackendUnavailable,
    CaptureError,
    ExecutionError,
    OutOfMemory,
    PlanError,
)
from offload.load.launch_times import known_or_measured_ns
from offload.load.options import AUTO, Options
from offload.load.place import place
from offload.load.trial import estimated_ns
from offload.plan import Plan
from offload.plan.lane_schedule import schedule_lanes

Placed = tuple[Prepared, Plan]

_SEVERAL = 2
_ONE_LANE = "launches run on one lane"
_NOT_PROVED = "load(verify=False) executes nothing on made-up inputs"


def placed_in_lanes(prepared: Prepared, plan: Plan, backend: Backend, options: Options) -> Placed:
    """Place the Program on the requested lanes; with "auto" on several only if that is quicker.

    Args:
        prepared: the Program on one lane.
        plan: its plan.
        backend: of the device; it can run lanes.
        options: `lanes` is 2 or more, or "auto".

    Raises:
        CaptureError: a number of lanes was requested, and the Program cannot run on several.
        PlanError: it cannot be placed there, or lanes share bytes.
        OutOfMemory, ExecutionError: launches cannot be timed; with "auto" that is not an error.
        CostModelError: `costs` are of another machine.
    """
    wanted, runner = options.lanes, backend.lanes
    assert runner is not None  # the options were checked
    refusal = runner.refusal(prepared)
    if refusal and wanted != AUTO:
        raise CaptureError(f"lanes={wanted}: {refusal}; load without lanes=, or with {AUTO!r}")
    if not refusal and wanted == AUTO and not options.verify:
        refusal = f"which is quicker is not known: {_NOT_PROVED}"
    if refusal:
        return _noted(prepared, f"{_ONE_LANE}: {refusal}"), plan
    trial = _Trial(prepared, plan, backend, runner, options.costs)
    if wanted != AUTO:
        laned = trial.on(int(wanted), timed=options.verify)
    else:
        try:
            laned = trial.quicker()
        except (
            BackendUnavailable,
            OutOfMemory,
            ExecutionError,
            CaptureError,
            PlanError,
        ) as error:
            laned, trial.note = None, f"several lanes could not be tried: {error}"
    if laned is None:
        return _noted(prepared, f"{_ONE_LANE}: {trial.note}"), plan
    return _noted(laned[0], trial.note), laned[1]


class _Trial:
    """A Program on several lanes.

    Attributes:
        note: the number of lanes, and why.
    """

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        backend: Backend,
        runner: LaneRunner,
        costs: LaunchCosts | None,
    ) -> None:
        self._prepared = prepared
        self._plan = plan
        self._backend = backend
        self._runner = runner
        self._costs = costs
        self._kept = ""
        self.note = ""

    def quicker(self) -> Placed | None:
        """The Program on several lanes; None if the device is no quicker with them."""
        laned = self.on(self._runner.most_lanes, timed=True)
        if laned is None:
            return None
        with stage("timing lanes", 1) as current:
            one = self._prepared, self._plan
            one_ns, lanes_ns = self._runner.time_executions([one, laned])
            current.advance()
        self.note += f"; measured {lanes_ns / 1e3:,.1f} us, and {one_ns / 1e3:,.1f} us on one lane"
        if lanes_ns >= one_ns:
            self.note = f"several lanes are no quicker: {self.note}"
            return None
        return laned

    def on(self, n_lanes: int, *, timed: bool) -> Placed | None:
        """The Program on at most `n_lanes`; None if one lane is as quick by launch times."""
        runner, prepared = self._runner, self._prepared
        schedule = schedule_lanes(
            self._launch_ns(timed),
            runner.conflicts(prepared),
            n_lanes,
            synchronisation_ns=runner.synchronisation_ns,
        )
        if len(schedule.lanes) < _SEVERAL:
            self.note = (
                "several lanes gain nothing, by the durations and dependencies of launches "
                f"(requested: {n_lanes})"
            )
            return None
        self.note = (
            f"launches run on {len(schedule.lanes)} lanes with {schedule.n_waits} waits between "
            f"them: predicted {schedule.predicted_ns / 1e3:,.1f} us, and "
            f"{schedule.sequential_ns / 1e3:,.1f} us on one lane{self._kept}"
        )
        found = runner.in_lanes(prepared, schedule.lanes)
        plan = place(found, self._backend)
        return found, dataclasses.replace(plan, launch_lanes=schedule.lanes)

    def _launch_ns(self, timed: bool) -> tuple[float, ...]:
        program = self._prepared.program
        machine, timing = self._backend.machine(program.device_index), self._backend.timing
        if not timed or timing is None:
            return estimated_ns(program, machine.costs.memory_bytes_per_ns)
        found, is_kept = known_or_measured_ns(
            self._costs,
            machine.name,
            machine.device,
            program,
            lambda: timing.time_launches(self._prepared, self._plan).times_ns,
        )
        self._kept = "; durations of launches were kept from former loads" if is_kept else ""
        return found


def _noted(prepared: Prepared, note: str) -> Prepared:
    return dataclasses.replace(prepared, notes=(*prepared.notes, note))
