"""`load(lanes=...)`: launches run on several lanes, where executions show that this is quicker."""

from __future__ import annotations

import dataclasses
import os
import time

import torch

from offload.backends import Backend, Prepared
from offload.compile import Fusion
from offload.console.progress import stage
from offload.errors import BindingError, ExecutionError, OutOfMemory
from offload.interpreter.own_generators import drawing_alone
from offload.load.launch_times import known_or_measured_ns
from offload.load.options import AUTO, MOST_LANES, Options
from offload.load.place import place
from offload.load.trial import (
    calls_after_pauses_ns,
    calls_in_turns_ns,
    estimated_ns,
    execute_made_up,
    typical_ns,
    weights_kept,
)
from offload.plan.lane_schedule import LaneSchedule, schedule_lanes
from offload.plan.launch_conflicts import launch_conflicts
from offload.plan.steps import Lane, launch_lane
from offload.run import Executable
from offload.run.lane_choice import LaneChoice

# The cost of a wait for a lane of another thread: visibility from core to core.
_SYNCHRONISATION_NS = 300.0

# Longer than torch's threads spin: 300,000 times (libgomp, env.c), 4 to 7 ms on an EPYC.
_SPIN_S = 0.02

_N_TIMED = 7
_N_WARM_UP = 2

# An alternative is chosen if it takes less than this fraction of the current choice: medians of
# equal calls differ by more than a percent.
_QUICKER = 0.97

# Lanes may take this many times as long as torch's threads and are still chosen: where another
# process takes a processor, torch's threads slow down several times, and lanes do not.
_GIVES_WAY = 1 / 0.97


def load_on_lanes(
    prepared: Prepared, backend: Backend, options: Options, fusion: Fusion | None
) -> Executable:
    """Load a Program whose launches may run on several lanes.

    Raises:
        PlanError, CaptureError, OutOfMemory, ExecutionError, CostModelError: as `Captured.load`.
    """
    return _LaneLoad(prepared, backend, options, fusion).loaded()


@dataclasses.dataclass(frozen=True, slots=True)
class _TimedCalls:
    """Median times of a call on made-up inputs.

    Attributes:
        threads_ns: on one lane, with torch's threads for each launch.
        one_ns: on one lane with one thread.
        lanes_ns: on the planned lanes.
        paused_ns: after pauses, with torch's threads, and for the better of the others; None where
            torch's threads are not the quickest, and this was not measured.
    """

    threads_ns: float
    one_ns: float
    lanes_ns: float
    paused_ns: tuple[float, float] | None = None

    @property
    def is_better_on_lanes(self) -> bool:
        """Whether lanes are better than one lane with one thread."""
        return self.lanes_ns < _QUICKER * self.one_ns

    @property
    def gives_way(self) -> bool:
        """Whether lanes take about as long as torch's threads."""
        return _QUICKER * self.threads_ns <= self.lanes_ns <= _GIVES_WAY * self.threads_ns

    @property
    def is_quickest_with_threads(self) -> bool:
        """Whether torch's threads are quicker than the others, one call after the other."""
        if self.is_better_on_lanes:
            return self.lanes_ns > _GIVES_WAY * self.threads_ns
        return self.one_ns >= _QUICKER * self.threads_ns

    @property
    def is_best_with_threads(self) -> bool:
        """Whether they also lose less by a pause than they gain without, as ratios."""
        if not self.is_quickest_with_threads or self.paused_ns is None:
            return self.is_quickest_with_threads
        other_ns = self.lanes_ns if self.is_better_on_lanes else self.one_ns
        gain = max(other_ns / self.threads_ns, 1.0)
        threads_paused_ns, other_paused_ns = self.paused_ns
        return _QUICKER * threads_paused_ns <= gain * other_paused_ns

    def described(self, n_lanes: int) -> dict[str, float]:
        """Return each time by what was called, in words."""
        threads = f"one lane, {torch.get_num_threads()} threads for a launch"
        one = "one lane, one thread for a launch"
        lanes = f"{n_lanes} lanes, one thread for a launch"
        found = {threads: self.threads_ns, one: self.one_ns, lanes: self.lanes_ns}
        if self.paused_ns is not None:
            other = lanes if self.is_better_on_lanes else one
            found |= zip(
                (f"{threads}, after a pause", f"{other}, after a pause"),
                self.paused_ns,
                strict=True,
            )
        return found


class _LaneLoad:
    """One load of a Program on planned and tried lanes. Owner: one call."""

    def __init__(
        self, prepared: Prepared, backend: Backend, options: Options, fusion: Fusion | None
    ) -> None:
        self._prepared = prepared
        self._backend = backend
        self._options = options
        self._fusion = fusion
        self._alone = drawing_alone(prepared.bound)
        self._estimated = ""
        self._kept = False

    def loaded(self) -> Executable:
        """The executable, with the choice."""
        most = self._most_lanes()
        if most == 1:
            threads = "torch is set to one thread (torch.set_num_threads), or may run on one"
            return self._made(None, LaneChoice(AUTO, refusal=threads))
        launch_ns = self._launch_ns()
        schedule = schedule_lanes(
            launch_ns,
            launch_conflicts(self._prepared.program),
            most,
            synchronisation_ns=_SYNCHRONISATION_NS,
        )
        choice = LaneChoice(
            self._options.lanes,
            n_lanes=len(schedule.lanes),
            threads_of_a_launch=1,
            estimated=self._estimated,
            kept=self._kept,
            predicted_ns=schedule.predicted_ns,
            sequential_ns=schedule.sequential_ns,
            lower_bound_ns=schedule.lower_bound_ns,
            n_planned=len(schedule.lanes),
            n_waits=schedule.n_waits,
            method=schedule.method,
        )
        if self._options.lanes != AUTO:
            return self._made(schedule.lanes, choice)
        return self._quickest(schedule, choice)

    def _most_lanes(self) -> int:
        if self._options.lanes != AUTO:
            return int(self._options.lanes)
        return min(torch.get_num_threads(), len(os.sched_getaffinity(0)), MOST_LANES)

    def _launch_ns(self) -> tuple[float, ...]:
        """Durations with one thread: kept, measured, or estimated where neither is possible."""
        program = self._prepared.program
        machine = self._backend.machine(program.device_index)
        device = f"{machine.device}, one thread for a launch"
        if self._alone.refusal:
            self._estimated = self._alone.refusal
        else:
            try:
                found, self._kept = known_or_measured_ns(
                    self._options.costs, machine.name, device, program, self._measured_ns
                )
                return found
            except OutOfMemory:
                raise
            except (BindingError, ExecutionError) as error:
                self._estimated = f"launches could not be timed on made-up inputs: {error}"
        return estimated_ns(program, machine.costs.memory_bytes_per_ns)

    def _measured_ns(self) -> tuple[float, ...]:
        """Median times of executions with one thread on made-up inputs."""
        with (
            weights_kept(self._prepared.bound),
            self._trial(self._one_lane) as run,
            stage("timing launches", _N_WARM_UP + _N_TIMED),
        ):
            execute_made_up(run, _N_WARM_UP)
            return typical_ns(run, _N_TIMED)

    def _quickest(self, schedule: LaneSchedule, choice: LaneChoice) -> Executable:
        """The quickest by calls: one lane with torch's threads or one thread, or several lanes."""
        as_torch = dataclasses.replace(choice, n_lanes=1, threads_of_a_launch=None)
        if self._estimated or schedule.predicted_ns > _QUICKER * schedule.sequential_ns:
            return self._made(None, as_torch)
        calls = self._timed_calls(schedule)
        found = dataclasses.replace(choice, measured_ns=calls.described(len(schedule.lanes)))
        if calls.is_best_with_threads:
            return self._made(None, dataclasses.replace(found, n_lanes=1, threads_of_a_launch=None))
        found = dataclasses.replace(found, stalls_after_pauses=calls.is_quickest_with_threads)
        if calls.is_better_on_lanes:
            found = dataclasses.replace(found, gives_way=calls.gives_way)
            return self._made(schedule.lanes, found)
        return self._made(self._one_lane, dataclasses.replace(found, n_lanes=1))

    def _timed_calls(self, schedule: LaneSchedule) -> _TimedCalls:
        """Time calls with torch's threads, with one thread, and on lanes.

        torch's threads spin for milliseconds after each launch (libgomp, GOMP_SPINCOUNT), on the
        processors that helpers need. So they take their turns after lanes.
        """
        runs: list[Executable] = []
        with weights_kept(self._prepared.bound):
            try:
                for lanes in (self._one_lane, schedule.lanes, None):
                    runs.append(self._trial(lanes))
                    execute_made_up(runs[-1], _N_WARM_UP)
                one, on_lanes, threads = runs
                time.sleep(_SPIN_S)
                one_ns, lanes_ns = calls_in_turns_ns([one, on_lanes], "timing lanes")
                threads_ns, again_ns = calls_in_turns_ns([threads, one], "timing torch's threads")
                found = _TimedCalls(threads_ns * one_ns / again_ns, one_ns, lanes_ns)
                if not found.is_quickest_with_threads:
                    return found
                other = on_lanes if found.is_better_on_lanes else one
                if other.lanes is not None:
                    other.lanes.share_always(False)
                paused_ns = calls_after_pauses_ns([threads, other], "timing pauses", _SPIN_S)
                return dataclasses.replace(found, paused_ns=(paused_ns[0], paused_ns[1]))
            finally:
                for run in runs:
                    run.close()

    @property
    def _one_lane(self) -> tuple[Lane, ...]:
        """One lane of all launches in recorded order, with one thread each."""
        return (launch_lane(len(self._prepared.program.launches)),)

    def _trial(self, lanes: tuple[Lane, ...] | None) -> Executable:
        """An executable for trial executions, which draw from separate generators."""
        prepared = dataclasses.replace(self._prepared, bound=self._alone.bound)
        run = Executable(
            prepared, place(prepared, self._backend, lanes), self._backend, fusion=self._fusion
        )
        if run.lanes is not None:
            run.lanes.share_always(True)
        return run

    def _made(self, lanes: tuple[Lane, ...] | None, choice: LaneChoice) -> Executable:
        return Executable(
            self._prepared,
            place(self._prepared, self._backend, lanes),
            self._backend,
            self._options.scheduling,
            verify=self._options.verify,
            fusion=self._fusion,
            lane_choice=choice,
        )
