"""`load(device=[...])`: launches are placed on several devices by their times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

from offload.console.progress import Progress, reporting
from offload.errors import CaptureError, OutOfMemory, PlanError
from offload.interpreter.own_generators import drawing_alone
from offload.load.device_memory import MemoryLeft
from offload.load.device_options import DeviceOptions, Watts
from offload.load.device_times import Costs, DeviceTimes
from offload.load.energy_trial import EnergyTrial, as_measured, costs_at
from offload.load.fitted_placement import FittedPlacement
from offload.load.placed_devices import link_lines, measured_links, placed_devices
from offload.load.placed_segments import CannotRun, LoadSegment, copies_used, load_segments
from offload.load.trial import calls_in_turns_ns, made_up_call, made_up_stream, weights_kept
from offload.load.triton_code import with_code
from offload.load.watts import measured_watts
from offload.plan.program_tasks import ProgramTasks
from offload.plan.task_placement import Objective, TaskPlacement
from offload.program import BoundProgram
from offload.run.device_choice import Crossings, DeviceChoice
from offload.run.placed_executable import PlacedExecutable
from offload.run.weight_copies import WeightCopies

_N_STREAMED = 16

# Several devices are kept if they take less than this fraction of one: medians of equal calls
# differ by less.
_QUICKER = 0.97


def load_on_devices(
    bound: BoundProgram, asked: DeviceOptions, load: LoadSegment, progress: Progress
) -> PlacedExecutable:
    """Load a Program whose launches may run on several devices.

    Args:
        bound: of observed launches.
        asked: the devices, and the options.
        load: loads a segment on a device, as a load on that device alone does.
        progress: of timing launches.

    Raises:
        BackendUnavailable: a device is missing, or no device has the recorded memory.
        PlanError: the launches do not fit the devices' memory.
        BindingError, CaptureError, OutOfMemory, ExecutionError: as `Captured.load`.
    """
    with reporting(progress):
        return _DevicesLoad(bound, asked, load).loaded()


class _DevicesLoad:
    """One load over several devices. Owner: one call."""

    def __init__(self, bound: BoundProgram, asked: DeviceOptions, load: LoadSegment) -> None:
        self._devices = placed_devices(bound.program, asked.devices)
        self._asked = asked
        self._objective, self._placement = asked.objective, asked.placement
        _refuse_whole(bound)
        # Slices for trials are prepared without a load, so kernels of a file have no code then.
        bound = with_code(bound, self._devices.backends[self._devices.home])
        self._bound = bound
        self._load = load
        self._alone = drawing_alone(bound)
        self._copies = WeightCopies(bound, self._devices.memories[self._devices.home])
        self._notes: list[str] = []
        self._times = DeviceTimes(
            bound,
            self._alone,
            self._devices,
            self._copies,
            kept=asked.costs,
            notes=self._notes,
        )

    def loaded(self) -> PlacedExecutable:
        """The executable, on the quickest choice of the devices."""
        devices = self._devices
        watts = self._measured_watts()
        costs_ns = [self._times.of_device(at) for at in range(len(devices.names))]
        links = measured_links(devices, self._times.hand_over_ns)
        self._notes += link_lines(devices, links)
        self._fitting = functools.partial(
            FittedPlacement,
            self._bound,
            devices,
            links,
            watts=watts,
            hand_over_ns=self._times.hand_over_ns,
        )
        self._placing = self._fitting(asked=self._asked)
        run, tasks = self._placed_run(costs_ns)
        with contextlib.ExitStack() as made:
            made.callback(run.close)
            placement, bound = run.placement, self._bound
            if self._objective is Objective.ENERGY:
                tasks, placement = self._within_slowdown(run, tasks, costs_ns)
            elif len({one.costs.planned for one in run.segments}) > 1:
                placement = self._quicker_single(run, tasks, costs_ns) or placement
            if placement is run.placement and self._alone.bound is bound:
                made.pop_all()
                return run.noted(self._notes)
        return self._made(bound, tasks, placement)

    def _placed_run(
        self, costs_ns: list[list[float | None]]
    ) -> tuple[PlacedExecutable, ProgramTasks]:
        """Place and load; a segment that its device cannot run is placed again elsewhere."""
        while True:
            tasks, placement = self._placing.fitted(costs_ns)
            try:
                return self._made(self._alone.bound, tasks, placement), tasks
            except CannotRun as refused:
                self._notes.append(str(refused))
                for launch in refused.launches:
                    costs_ns[refused.device][launch] = None

    def _quicker_single(
        self, run: PlacedExecutable, tasks: ProgramTasks, costs_ns: Sequence[Costs]
    ) -> TaskPlacement | None:
        """The placement on the best single device, if its calls are quicker; else None."""
        if self._alone.refusal:
            return None
        found = self._best_single(tasks, costs_ns)
        if found is None:
            return None
        best, placement, single = found
        try:
            with weights_kept(self._alone.bound):
                made_up, what, n_executions = made_up_call, "calls", 1
                if self._objective is Objective.THROUGHPUT:
                    n_executions, what = _N_STREAMED, f"results of {_N_STREAMED} submissions"
                    made_up = functools.partial(made_up_stream, n_executions=n_executions)
                times_ns = calls_in_turns_ns([run, single], "timing devices", made_up)
        finally:
            single.close()
        placed_ns, single_ns = (ns / n_executions for ns in times_ns)
        self._notes.append(
            f"measured at the load: {what} take {placed_ns / 1e3:,.0f} us each on several devices, "
            f"and {single_ns / 1e3:,.0f} us on {self._devices.names[best]} alone"
        )
        if single_ns * _QUICKER > placed_ns:
            return None
        return as_measured(placement, run.placement)

    def _best_single(
        self, tasks: ProgramTasks, costs_ns: Sequence[Costs]
    ) -> tuple[int, TaskPlacement, PlacedExecutable] | None:
        """The quickest single device with room for all launches, with the Program loaded there.

        Launches that must stay on the recorded device stay there.
        """
        home = self._devices.home
        whole = [at for at, costs in enumerate(costs_ns) if None not in costs]
        for best in sorted(whole, key=lambda at: sum(costs_ns[at])):  # type: ignore[arg-type]
            n_launches = len(self._bound.program.launches)
            where = [home if one in self._times.stays else best for one in range(n_launches)]
            alone = costs_at(costs_ns, where)
            with contextlib.suppress(PlanError, CannotRun, OutOfMemory):
                _, placement = self._placing.fitted(alone)
                return best, placement, self._made(self._alone.bound, tasks, placement)
        return None

    def _within_slowdown(
        self, run: PlacedExecutable, tasks: ProgramTasks, costs_ns: Sequence[Costs]
    ) -> tuple[ProgramTasks, TaskPlacement]:
        """The placement of the least energy whose calls are measured to be quick enough."""
        if self._alone.refusal:
            self._notes.append(f"max_slowdown is held by prediction alone: {self._alone.refusal}")
            return tasks, run.placement
        bound = self._alone.bound
        trial = EnergyTrial(
            lambda asked: self._fitting(asked=asked),
            lambda tasks, placement: self._made(bound, tasks, placement),
            lambda runs: calls_in_turns_ns(runs, "timing devices", made_up_call),
            self._asked,
        )
        n_launches = len(bound.program.launches)
        singles = [
            [
                self._devices.home if one in self._times.stays else device
                for one in range(n_launches)
            ]
            for device, costs in enumerate(costs_ns)
            if None not in costs
        ]
        with weights_kept(bound):
            tasks, placement, note = trial.chosen(run, tasks, costs_ns, singles)
        self._notes.append(note)
        return tasks, placement

    def _made(
        self, bound: BoundProgram, tasks: ProgramTasks, placement: TaskPlacement
    ) -> PlacedExecutable:
        """The executable of segments on their devices."""
        devices = self._devices
        groups = self._placing.grouped(bound, tasks, placement)
        segments = load_segments(
            groups,
            devices,
            tasks,
            kind=self._placement,
            copies=self._copies,
            load=self._load,
            has_room=MemoryLeft(bound.program, groups, devices).take,
        )
        program = bound.program
        choice = DeviceChoice(
            [one.costs for one in segments],
            self._placement,
            self._times.hand_over_ns,
            is_throughput=self._objective is Objective.THROUGHPUT,
            crossings=Crossings.between(
                devices.memories,
                devices.home,
                tasks.graph.links,
                program.values,
                {result.view.value for result in program.results},
            ),
        )
        untimed = {at for at, one in enumerate(devices.backends) if one.capabilities.queues_work}
        copies = self._copies.part(copies_used(segments, devices))
        return PlacedExecutable(
            bound,
            placement,
            segments,
            choice,
            untimed,
            notes=self._notes,
            memories=devices.memories,
            copies=copies if copies else None,
        )

    def _measured_watts(self) -> tuple[Watts, ...] | None:
        """The power of devices, for the least energy; None: another objective."""
        if self._objective is not Objective.ENERGY:
            return None
        if self._asked.watts is not None:
            self._notes.append("watts are as given")
            return self._asked.watts
        found, how = measured_watts(self._devices)
        self._notes += how
        return found


def _refuse_whole(bound: BoundProgram) -> None:
    opaque = bound.program.opaque
    if opaque is not None:
        raise CaptureError(
            f"the program is one launch, which no placement divides: {opaque.reason}"
        )
    if bound.program.groups:
        raise CaptureError(
            "ranks exchange tensors in the program, whose launches start and wait on one device: "
            "load it there"
        )
    if bound.bindings.stored:
        raise CaptureError(
            "weights are in files, and segments on several devices read weights in memory: build "
            "the model with its weights and capture that, or load it on one device"
        )
    if bound.bindings.before_execution is not None:
        raise CaptureError(
            "a training step compares its parameters before each execution, which segments do "
            "not: load it on one device"
        )
