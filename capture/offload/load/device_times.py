"""Durations of a Program's launches on each of several devices: measured, kept or estimated."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

from offload.backends import Backend, Prepared
from offload.console.amounts import show_count
from offload.console.progress import stage
from offload.costs import LaunchCosts
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    ExecutionError,
    OutOfMemory,
)
from offload.interpreter.own_generators import DrawingAlone
from offload.interpreter.retarget import why_not_on
from offload.load.launch_times import known_or_measured_ns
from offload.load.place import place
from offload.load.placed_devices import PlacedDevices
from offload.load.placed_segments import part_on
from offload.load.trial import (
    call_and_submission_ns,
    estimated_ns,
    execute_made_up,
    typical_ns,
    weights_kept,
)
from offload.plan import Plan
from offload.plan.program_tasks import staying_launches, task_launches
from offload.program import BoundProgram, Role
from offload.program.slice import slice_program
from offload.run import Executable
from offload.run.weight_copies import WeightCopies

# The assumed cost of handing a segment to another device, unmeasured: waking a thread.
_HAND_OVER_NS = 10_000.0

_N_WARM_UP = 2
_N_TIMED = 7
_N_CALLS = 20

Costs = Sequence[float | None]


class DeviceTimes:
    """The durations of a Program's launches on each device. Owner: one load.

    Attributes:
        bound: the Program.
        stays: the launches that no device but the recorded one may run.
        hand_over_ns: the cost of handing a segment to another device, at least the assumed one.
    """

    def __init__(
        self,
        bound: BoundProgram,
        alone: DrawingAlone,
        devices: PlacedDevices,
        copies: WeightCopies,
        *,
        kept: LaunchCosts | None,
        notes: list[str],
    ) -> None:
        """Begin without durations.

        Args:
            bound: the Program.
            alone: the same, to be executed with numbers of its own.
            devices: where launches may run.
            copies: of weights on devices with separate memory.
            kept: durations of former loads.
            notes: receives sentences for people.
        """
        self.bound = bound
        self.stays = staying_launches(bound.program)
        self.hand_over_ns = _HAND_OVER_NS
        self._alone = alone
        self._devices = devices
        self._copies = copies
        self._kept = kept
        self._notes = notes
        self._groups = task_launches(bound.program)

    def of_device(self, at: int) -> list[float | None]:
        """The duration of each launch on a device in ns; None: it cannot run there, or must not.

        Raises:
            PlanError, OutOfMemory: the launches have no room there.
        """
        costs_ns = self.launch_ns(at)
        if self._devices.shares(at):
            return list(costs_ns)
        program = self.bound.program
        kind = self._devices.memories[at].device.type
        found: list[float | None] = []
        why: Counter[str] = Counter()
        for launch, cost_ns in zip(program.launches, costs_ns, strict=True):
            reason = "" if launch.index in self.stays else why_not_on(program, launch, kind)
            why.update([reason] if reason else [])
            found.append(None if reason or launch.index in self.stays else cost_ns)
        home = self._devices.names[self._devices.home]
        for reason, count in why.most_common():
            launches = show_count(count, "launch", "launches")
            self._notes.append(f"{launches} not on {self._devices.names[at]}, but {home}: {reason}")
        return found

    def launch_ns(self, at: int) -> Costs:
        """The duration of each launch on a device, also of those that must stay elsewhere."""
        name = self._devices.names[at]
        if not self._devices.shares(at):
            return self._launch_ns_there(at, name)
        backend, program = self._devices.backends[at], self.bound.program
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
        program, backend = self.bound.program, self._devices.backends[at]
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
        program, kind = self.bound.program, self._devices.memories[at].device.type
        return [
            group
            for group in self._groups
            if self.stays.isdisjoint(group)
            and not any(why_not_on(program, program.launches[one], kind) for one in group)
        ]

    def _with_room(self, at: int, groups: Sequence[tuple[int, ...]]) -> list[int]:
        """Launches of the first tasks whose weights fit half of the device's memory."""
        program, memory = self.bound.program, self._devices.memories[at]
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
        every = estimated_ns(self.bound.program, costs.memory_bytes_per_ns)
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
        found, is_kept = known_or_measured_ns(self._kept, machine.name, device, program, measure)
        if is_kept:
            self._notes.append(f"durations of launches on {name} were kept from former loads")
        return found

    def _executed_ns(self, run: Executable) -> tuple[float, ...]:
        """Times of launches in executions, scaled to the duration of whole calls."""
        with weights_kept(run.bound), stage("timing launches", _N_WARM_UP + _N_TIMED):
            execute_made_up(run, _N_WARM_UP)
            launches_ns = typical_ns(run, _N_TIMED)
            call_ns, submitted_ns = call_and_submission_ns(run, _N_CALLS)
        self.hand_over_ns = max(self.hand_over_ns, submitted_ns - call_ns)
        stretch = call_ns / sum(launches_ns) if sum(launches_ns) else 1.0
        return tuple(one * max(1.0, stretch) for one in launches_ns)

    def _possible_ns(self, at: int) -> Costs:
        """Estimates for the launches that a device can run, determined task by task."""
        found: list[float | None] = [None] * len(self.bound.program.launches)
        for group in self._groups if self._devices.shares(at) else self._movable(at):
            with contextlib.suppress(CaptureError):
                part = slice_program(self._alone.bound, group)
                self._devices.backends[at].prepare(part_on(self._devices, self._copies, part, at))
                for launch, ns in zip(group, self._estimated_ns(at, group), strict=True):
                    found[launch] = ns
        return found
