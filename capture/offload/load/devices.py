"""`load(device=[...])`: launches are placed on several devices, as their times say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from offload.backends import Backend
from offload.console.progress import Progress, stage, telling
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    ExecutionError,
    OutOfMemory,
)
from offload.interpreter.own_generators import drawing_alone
from offload.load.options import named_backend
from offload.load.place import place
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
from offload.plan.program_tasks import ProgramTasks, program_tasks
from offload.plan.task_graph import Processor
from offload.plan.task_placement import Objective, TaskPlacement, place_tasks
from offload.plan.topology import Link
from offload.program import BoundProgram
from offload.program.slice import Slice, slice_program
from offload.run import Executable
from offload.run.device_choice import DeviceChoice, Placement, SegmentCosts
from offload.run.placed_executable import PlacedExecutable, PlacedSegment

# Devices that share the caller's memory: what one has made the other reads where it is.
_BYTES_PER_SECOND = 1e18

# What hands a segment to another device where nobody has measured it: a thread is woken.
_HAND_OVER_NS = 10_000.0

_N_WARM_UP = 2
_N_TIMED = 7
_N_CALLS = 20
_N_STREAMED = 16

# Where segments may be moved, one takes no more than such a part of all, nor less than several
# hand-overs.
_N_PARTS = 8
_LEAST_HAND_OVERS = 4

# Several devices are kept where one takes more than this: medians of the same differ by less.
_QUICKER = 0.97

Costs = Sequence[float | None]

Device = str | torch.device | Backend

LoadSegment = Callable[[BoundProgram, Backend], Executable]
"""Loads a Program on a device as a load of that device alone does."""


def one_device(device: Device | list[Device] | None) -> Device | None:
    """The one that is named; None: none is, or several are."""
    return None if isinstance(device, list) else device


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What was asked of a load on several devices.

    Attributes:
        devices: the first has the caller's memory.
        objective: what is to be little.
        placement: when devices are chosen.
    """

    devices: tuple[Device, ...]
    objective: Objective
    placement: Placement


def several_devices(
    device: Device | list[Device] | None,
    objective: str | None,
    placement: str | None,
    **options: object,
) -> DeviceOptions:
    """What was asked of a load on several devices, which has none of the other options.

    Raises:
        BindingError: one of the options is given, there is no list of devices, or no such objective
            or placement.
    """
    if not isinstance(device, list) or not device:
        raise BindingError(
            "objective= and placement= are for several devices: expected a list of at least one, "
            f"as device=['cpu', CpuBackend(threads=1)], got {device!r}"
        )
    for name, option in options.items():
        if option is not None:
            raise BindingError(f"{name}={option!r}: leave it out of a load on several devices")
    return DeviceOptions(
        tuple(device),
        _checked_objective(objective or Objective.LATENCY),
        _checked_placement(placement or Placement.STATIC),
    )


def load_on_devices(
    bound: BoundProgram, asked: DeviceOptions, load: LoadSegment, progress: Progress
) -> PlacedExecutable:
    """Load a Program whose launches may run on several devices that share memory.

    Args:
        bound: of launches that were seen.
        asked: the devices, and what is wanted of them.
        load: loads a segment on a device, as a load of that device alone does.
        progress: of timing launches.

    Raises:
        BackendUnavailable: a device is not there, or has memory of its own.
        BindingError, CaptureError, PlanError, OutOfMemory, ExecutionError: as `Captured.load`.
    """
    with telling(progress):
        return _DevicesLoad(bound, asked, load).loaded()


class _DevicesLoad:
    """One load over several devices. Owner: one call."""

    def __init__(self, bound: BoundProgram, asked: DeviceOptions, load: LoadSegment) -> None:
        self._backends = [_sharing_memory(bound, one) for one in asked.devices]
        self._objective, self._placement = asked.objective, asked.placement
        _refuse_whole(bound)
        self._bound = bound
        self._load = load
        self._alone = drawing_alone(bound)
        self._hand_over_ns = _HAND_OVER_NS
        self._notes: list[str] = []

    def loaded(self) -> PlacedExecutable:
        """The executable, on as many of the devices as are quicker."""
        names = self._names()
        costs_ns = [self._launch_ns(at, name) for at, name in enumerate(names)]
        tasks = self._tasks(names, costs_ns)
        placement = place_tasks(tasks.graph, objective=self._objective)
        run = self._made(self._alone.bound, tasks, placement)
        if len(set(placement.processors)) > 1:
            single = self._quicker_single(run, tasks, costs_ns)
            if single is not None:
                run.close()
                return self._made(self._bound, tasks, single)
        if self._alone.bound is self._bound:
            return run.noted(self._notes)
        run.close()
        return self._made(self._bound, tasks, placement)

    def _names(self) -> list[str]:
        """Of the devices, for people: with their place where several are the same."""
        found = [one.name for one in self._backends]
        return [f"{name}#{at}" if found.count(name) > 1 else name for at, name in enumerate(found)]

    def _tasks(self, names: Sequence[str], costs_ns: Sequence[Costs]) -> ProgramTasks:
        processors = [
            Processor(name, backend.machine().memory_bytes or None)
            for name, backend in zip(names, self._backends, strict=True)
        ]
        link = Link(_BYTES_PER_SECOND, self._hand_over_ns)
        links = dict.fromkeys(itertools.permutations(range(len(names)), 2), link)
        by_launch = list(zip(*costs_ns, strict=True))
        return program_tasks(self._bound.program, by_launch, processors, links, home=0)

    def _launch_ns(self, at: int, name: str) -> Costs:
        """What each launch takes on a device; None: it cannot run there."""
        backend, program = self._backends[at], self._bound.program
        try:
            prepared = backend.prepare(self._alone.bound)
        except CaptureError as error:
            self._notes.append(f"{name} cannot run all launches: {error}")
            return self._possible_ns(backend)
        plan = place(prepared, backend)
        if self._alone.refusal:
            why = self._alone.refusal
        elif backend.timing is None and backend.capabilities.queues_work:
            why = "the device does not tell when launches begin"
        else:
            try:
                if backend.timing is not None:
                    return backend.timing.time_launches(prepared, plan).times_ns
                with contextlib.closing(Executable(prepared, plan, backend)) as run:
                    return self._executed_ns(run)
            except OutOfMemory:
                raise
            except (BackendUnavailable, BindingError, CaptureError, ExecutionError) as error:
                why = str(error)
        self._notes.append(f"launches on {name} are estimated: {why}")
        return estimated_ns(program, backend.machine().costs.memory_bytes_per_ns)

    def _executed_ns(self, run: Executable) -> tuple[float, ...]:
        """Launches as executions have them, stretched to what calls take in all."""
        with weights_kept(run.bound), stage("timing launches", _N_WARM_UP + _N_TIMED):
            execute_made_up(run, _N_WARM_UP)
            launches_ns = typical_ns(run, _N_TIMED)
            call_ns, submitted_ns = call_and_submission_ns(run, _N_CALLS)
        self._hand_over_ns = max(self._hand_over_ns, submitted_ns - call_ns)
        stretch = call_ns / sum(launches_ns) if sum(launches_ns) else 1.0
        return tuple(one * max(1.0, stretch) for one in launches_ns)

    def _possible_ns(self, backend: Backend) -> Costs:
        """Estimates for the launches that a device can run, told task by task."""
        program = self._bound.program
        estimated = estimated_ns(program, backend.machine().costs.memory_bytes_per_ns)
        any_costs = [(0.0,)] * len(program.launches)
        groups = program_tasks(program, any_costs, [Processor("any")], {}, home=0).launches
        found: list[float | None] = [None] * len(program.launches)
        for group in groups:
            with contextlib.suppress(CaptureError):
                backend.prepare(slice_program(self._alone.bound, group).bound)
                for launch in group:
                    found[launch] = estimated[launch]
        return found

    def _quicker_single(
        self, run: PlacedExecutable, tasks: ProgramTasks, costs_ns: Sequence[Costs]
    ) -> TaskPlacement | None:
        """All launches on the best device, where calls are quicker so than on several."""
        names = [one.name for one in tasks.graph.processors]
        whole = [at for at, costs in enumerate(costs_ns) if None not in costs]
        if self._alone.refusal or not whole:
            return None
        best = min(whole, key=lambda at: sum(costs_ns[at]))  # type: ignore[arg-type]
        nowhere = [None] * len(self._bound.program.launches)
        alone = self._tasks(
            names, [costs if at == best else nowhere for at, costs in enumerate(costs_ns)]
        )
        placement = place_tasks(alone.graph, objective=self._objective)
        single = self._made(self._alone.bound, tasks, placement)
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
            f"and {single_ns / 1e3:,.0f} us on {names[best]} alone"
        )
        return placement if single_ns * _QUICKER <= placed_ns else None

    def _made(
        self, bound: BoundProgram, tasks: ProgramTasks, placement: TaskPlacement
    ) -> PlacedExecutable:
        """Segments on their devices; what was loaded is closed where another one fails."""
        groups = self._groups(tasks, placement)
        group_of = {task: at for at, group in enumerate(groups) for task in group}
        segments: list[PlacedSegment] = []
        with contextlib.ExitStack() as loaded:
            for at, group in enumerate(groups):
                launches = sorted(index for task in group for index in tasks.launches[task])
                part = slice_program(bound, launches) if len(groups) > 1 else _whole(bound)
                before = {
                    group_of[edge.producer]
                    for edge in tasks.graph.edges
                    if group_of[edge.consumer] == at
                }
                planned = placement.processors[group[0]]
                runs: list[Executable | None] = []
                costs: list[float | None] = []
                for device, backend in enumerate(self._backends):
                    cost = _sum(tasks.graph.tasks[task].costs_ns[device] for task in group)
                    is_wanted = device == planned or self._placement is not Placement.STATIC
                    run = (
                        self._load(part.bound, backend) if is_wanted and cost is not None else None
                    )
                    if run is not None:
                        loaded.callback(run.close)
                    runs.append(run)
                    costs.append(cost if run is not None else None)
                after = tuple(sorted(before - {at}))
                segments.append(
                    PlacedSegment(part, tuple(runs), SegmentCosts(tuple(costs), after, planned))
                )
            loaded.pop_all()
        choice = DeviceChoice(
            [one.costs for one in segments],
            self._placement,
            self._hand_over_ns,
            is_throughput=self._objective is Objective.THROUGHPUT,
        )
        untimed = {at for at, one in enumerate(self._backends) if one.capabilities.queues_work}
        return PlacedExecutable(bound, placement, segments, choice, untimed, notes=self._notes)

    def _groups(self, tasks: ProgramTasks, placement: TaskPlacement) -> list[tuple[int, ...]]:
        """Tasks that are executed as one: as planned, and in parts where these may be moved."""
        segments = placement.segments()
        if self._placement is Placement.STATIC:
            return [one.tasks for one in segments]
        total_ns = sum(placement.end_ns) - sum(placement.begin_ns)
        most_ns = max(total_ns / _N_PARTS, _LEAST_HAND_OVERS * self._hand_over_ns)
        groups: list[tuple[int, ...]] = []
        for one in segments:
            taken_ns = 0
            part: list[int] = []
            for task in one.tasks:
                if part and taken_ns >= most_ns:
                    groups.append(tuple(part))
                    part, taken_ns = [], 0
                part.append(task)
                taken_ns += placement.end_ns[task] - placement.begin_ns[task]
            groups.append(tuple(part))
        return groups


def _whole(bound: BoundProgram) -> Slice:
    """All launches, called as the Program is."""
    return Slice(bound, tuple(view.value for view in bound.program.inputs), ())


def _sum(costs: Iterable[int | None]) -> float | None:
    found = list(costs)
    return None if None in found else float(sum(one for one in found if one is not None))


def _sharing_memory(bound: BoundProgram, device: Device) -> Backend:
    """The backend of a device that reads the caller's memory."""
    backend, index = named_backend(device)
    if backend.records() != bound.program.device or index is not None:
        raise BackendUnavailable(
            f"device {device!r} has memory of its own, and the program is on "
            f"{bound.program.device}: placement is for devices that share that memory, such as "
            "several CpuBackend(threads=)"
        )
    return backend


def _checked_objective(objective: str) -> Objective:
    if objective not in (Objective.LATENCY, Objective.THROUGHPUT):
        raise BindingError(
            f"objective: expected latency or throughput, got {objective!r}: energy is planned by "
            "offload.plan.task_placement, from watts that no device tells"
        )
    return Objective(objective)


def _checked_placement(placement: str) -> Placement:
    if placement not in list(Placement):
        raise BindingError(f"placement: expected one of {', '.join(Placement)}, got {placement!r}")
    return Placement(placement)


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
            "a step that trains compares its parameters before each execution, which segments do "
            "not: load it on one device"
        )
