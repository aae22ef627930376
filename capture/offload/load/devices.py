"""`load(device=[...])`: launches are placed on several devices by their times."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Sequence

from offload.backends import Backend, Prepared
from offload.console.amounts import show_count
from offload.console.progress import Progress, stage, telling
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    ExecutionError,
    OutOfMemory,
    PlanError,
)
from offload.interpreter.own_generators import drawing_alone
from offload.interpreter.retarget import why_not_on
from offload.load.device_memory import MemoryLeft
from offload.load.device_options import DeviceOptions, Watts
from offload.load.energy_trial import EnergyTrial, as_measured, costs_at
from offload.load.fitted_placement import FittedPlacement
from offload.load.launch_times import known_or_measured_ns
from offload.load.place import place
from offload.load.placed_devices import link_lines, measured_links, placed_devices
from offload.load.placed_segments import (
    CannotRun,
    LoadSegment,
    copies_used,
    load_segments,
    part_on,
)
from offload.load.trial import (
    call_and_submission_ns,
    calls_in_turns_ns,
    estimated_ns,
    execute_made_up,
    made_up_call,
    made_up_stream,
    typical_ns,
    weights_kept,
)
from offload.load.triton_code import with_code
from offload.load.watts import measured_watts
from offload.plan import Plan
from offload.plan.program_tasks import ProgramTasks, staying_launches, task_launches
from offload.plan.task_placement import Objective, TaskPlacement
from offload.program import BoundProgram, Role
from offload.program.slice import slice_program
from offload.run import Executable
from offload.run.device_choice import Crossings, DeviceChoice
from offload.run.placed_executable import PlacedExecutable
from offload.run.weight_copies import WeightCopies

# The assumed cost of handing a segment to another device, unmeasured: waking a thread.
_HAND_OVER_NS = 10_000.0

_N_WARM_UP = 2
_N_TIMED = 7
_N_CALLS = 20
_N_STREAMED = 16

# Several devices are kept if they take less than this fraction of one: medians of equal calls
# differ by less.
_QUICKER = 0.97

Costs = Sequence[float | None]


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
    with telling(progress):
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
        self._hand_over_ns = _HAND_OVER_NS
        self._notes: list[str] = []
        self._stays = staying_launches(bound.program)
        self._groups = task_launches(bound.program)

    def loaded(self) -> PlacedExecutable:
        """The executable, on the quickest choice of the devices."""
        names, devices = self._devices.names, self._devices
        watts = self._measured_watts()
        costs_ns = [self._able(at, self._launch_ns(at, name)) for at, name in enumerate(names)]
        links = measured_links(devices, self._hand_over_ns)
        self._notes += link_lines(devices, links)
        self._fitting = functools.partial(
            FittedPlacement,
            self._bound,
            devices,
            links,
            watts=watts,
            hand_over_ns=self._hand_over_ns,
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

    # ---- costs --------------------------------------------------------------------------------

    def _able(self, at: int, costs_ns: Costs) -> list[float | None]:
        """The costs of a device; None for launches that must stay elsewhere."""
        if self._devices.shares(at):
            return list(costs_ns)
        program = self._bound.program
        kind = self._devices.memories[at].device.type
        found: list[float | None] = []
        why: Counter[str] = Counter()
        for launch, cost_ns in zip(program.launches, costs_ns, strict=True):
            reason = "" if launch.index in self._stays else why_not_on(program, launch, kind)
            why.update([reason] if reason else [])
            found.append(None if reason or launch.index in self._stays else cost_ns)
        home = self._devices.names[self._devices.home]
        for reason, count in why.most_common():
            launches = show_count(count, "launch", "launches")
            self._notes.append(f"{launches} not on {self._devices.names[at]}, but {home}: {reason}")
        return found

    def _launch_ns(self, at: int, name: str) -> Costs:
        """The cost of each launch on a device; None: it cannot run there."""
        if not self._devices.shares(at):
            return self._launch_ns_there(at, name)
        backend, program = self._devices.backends[at], self._bound.program
        try:
            return self._times_ns(self._alone.bound, backend, name)
        except CaptureError as error:
            self._notes.append(f"{name} cannot run all launches: {error}")
            return self._possible_ns(at)
        except OutOfMemory:
            raise
        except (BackendUnavailable, BindingError, ExecutionError) as error:
            self._notes.append(f"launches on {name} are estimated: {error}")
        return estimated_ns(program, backend.machine().costs.memory_bytes_per_ns)

    def _launch_ns_there(self, at: int, name: str) -> Costs:
        """The same for a device with separate memory, for launches that need not stay.

        Launches whose weights together fit half of that memory are timed; others are estimated.
        """
        program, backend = self._bound.program, self._devices.backends[at]
        groups = self._movable(at)
        movable = [launch for group in groups for launch in group]
        found: list[float | None] = [None] * len(program.launches)
        for launch, ns in zip(movable, self._estimated_ns(at, movable), strict=True):
            found[launch] = ns
        launches = self._with_room(at, groups)
        if not launches:
            return found
        if len(launches) < len(movable):
            n_left = show_count(len(movable) - len(launches), "launch", "launches")
            self._notes.append(f"{n_left} on {name} estimated: weights do not fit for a trial")
        part = slice_program(self._alone.bound, launches)
        try:
            bound = part_on(self._devices, self._copies, part, at)
            times_ns = self._times_ns(bound, backend, name)
        except CaptureError as error:
            self._notes.append(f"{name} cannot run all launches that may move: {error}")
            return self._possible_ns(at)
        except (BackendUnavailable, BindingError, ExecutionError) as error:
            self._notes.append(f"launches on {name} are estimated: {error}")
            return found
        for launch, ns in zip(launches, times_ns, strict=True):
            found[launch] = ns
        return found

    def _movable(self, at: int) -> list[tuple[int, ...]]:
        """The launches of each task that a device with separate memory may run."""
        program, kind = self._bound.program, self._devices.memories[at].device.type
        return [
            group
            for group in self._groups
            if self._stays.isdisjoint(group)
            and not any(why_not_on(program, program.launches[one], kind) for one in group)
        ]

    def _with_room(self, at: int, groups: Sequence[tuple[int, ...]]) -> list[int]:
        """Launches of the first tasks whose weights fit half of the device's memory."""
        program, memory = self._bound.program, self._devices.memories[at]
        room_bytes = self._devices.backends[at].machine(memory.device.index).memory_bytes
        taken: set[int] = set()
        found: list[int] = []
        for group in groups:
            used = {value for one in group for value in program.launches[one].touched()}
            weights = taken | {one for one in used if program.values[one].role is Role.WEIGHT}
            size_bytes = sum(program.values[value].size_bytes for value in weights)
            if not room_bytes or size_bytes <= room_bytes // 2:
                taken = weights
                found += group
        return found

    def _estimated_ns(self, at: int, launches: Sequence[int]) -> list[float]:
        memory = self._devices.memories[at]
        costs = self._devices.backends[at].machine(memory.device.index).costs
        every = estimated_ns(self._bound.program, costs.memory_bytes_per_ns)
        return [every[launch] for launch in launches]

    def _times_ns(self, bound: BoundProgram, backend: Backend, name: str) -> Sequence[float]:
        """The measured or estimated times of a Program's launches on a device.

        Raises:
            CaptureError: the device cannot run one of them.
            OutOfMemory, BackendUnavailable, BindingError, ExecutionError: they cannot be timed.
        """
        prepared = backend.prepare(bound)
        plan = place(prepared, backend)
        if self._alone.refusal:
            why = self._alone.refusal
        elif backend.timing is None and backend.capabilities.queues_work:
            why = "the device does not report when launches begin"
        else:
            try:
                return self._known_or_measured_ns(prepared, plan, backend, name)
            except CaptureError as error:
                why = str(error)
        self._notes.append(f"launches on {name} are estimated: {why}")
        machine = backend.machine(bound.program.device_index)
        return estimated_ns(bound.program, machine.costs.memory_bytes_per_ns)

    def _known_or_measured_ns(
        self, prepared: Prepared, plan: Plan, backend: Backend, name: str
    ) -> Sequence[float]:
        program = prepared.program
        machine = backend.machine(program.device_index)
        timing = backend.timing

        def measure() -> Sequence[float]:
            if timing is not None:
                return timing.time_launches(prepared, plan).times_ns
            with contextlib.closing(Executable(prepared, plan, backend)) as run:
                return self._executed_ns(run)

        how = machine.settings if timing is not None else f"{machine.settings}, as calls take"
        device = ", ".join(filter(None, [machine.device, how]))
        found, is_kept = known_or_measured_ns(
            self._asked.costs, machine.name, device, program, measure
        )
        if is_kept:
            self._notes.append(f"durations of launches on {name} were kept from former loads")
        return found

    def _executed_ns(self, run: Executable) -> tuple[float, ...]:
        """Times of launches in executions, scaled to the duration of whole calls."""
        with weights_kept(run.bound), stage("timing launches", _N_WARM_UP + _N_TIMED):
            execute_made_up(run, _N_WARM_UP)
            launches_ns = typical_ns(run, _N_TIMED)
            call_ns, submitted_ns = call_and_submission_ns(run, _N_CALLS)
        self._hand_over_ns = max(self._hand_over_ns, submitted_ns - call_ns)
        stretch = call_ns / sum(launches_ns) if sum(launches_ns) else 1.0
        return tuple(one * max(1.0, stretch) for one in launches_ns)

    def _possible_ns(self, at: int) -> Costs:
        """Estimates for the launches that a device can run, determined task by task."""
        found: list[float | None] = [None] * len(self._bound.program.launches)
        for group in self._groups if self._devices.shares(at) else self._movable(at):
            with contextlib.suppress(CaptureError):
                part = slice_program(self._alone.bound, group)
                self._devices.backends[at].prepare(part_on(self._devices, self._copies, part, at))
                for launch, ns in zip(group, self._estimated_ns(at, group), strict=True):
                    found[launch] = ns
        return found

    # ---- placement ----------------------------------------------------------------------------

    def _placed_run(
        self, costs_ns: list[list[float | None]]
    ) -> tuple[PlacedExecutable, ProgramTasks]:
        """Place and load; a segment that a device turns out unable to run is placed anew."""
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
            where = [home if one in self._stays else best for one in range(n_launches)]
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
            [self._devices.home if one in self._stays else device for one in range(n_launches)]
            for device, costs in enumerate(costs_ns)
            if None not in costs
        ]
        with weights_kept(bound):
            tasks, placement, told = trial.chosen(run, tasks, costs_ns, singles)
        self._notes.append(told)
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
            self._hand_over_ns,
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
    if bound.bindings.before_execution is not None:
        raise CaptureError(
            "a training step compares its parameters before each execution, which segments do "
            "not: load it on one device"
        )
