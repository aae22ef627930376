"""Placements of a Program's tasks that fit the memory of every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.console.amounts import show_bytes
from offload.errors import PlanError
from offload.load.device_memory import memory_limits, taken_bytes
from offload.load.device_options import DeviceOptions, Watts
from offload.load.placed_devices import PlacedDevices
from offload.load.placed_segments import PlacedGroup, grouped
from offload.plan.program_tasks import ProgramTasks, program_tasks
from offload.plan.task_graph import Processor
from offload.plan.task_placement import TaskPlacement, place_tasks
from offload.plan.topology import Link
from offload.program import BoundProgram
from offload.run.transfers import Memory

# Limit of new placements because a memory is too small for what tasks hold beside weights.
_MOST_TRIES = 16


class FittedPlacement:
    """Places the tasks of one Program. Owner: one load."""

    def __init__(
        self,
        bound: BoundProgram,
        devices: PlacedDevices,
        links: Mapping[tuple[int, int], Link],
        *,
        watts: Sequence[Watts] | None,
        asked: DeviceOptions,
        hand_over_ns: float,
    ) -> None:
        """Prepare without placing.

        Args:
            bound: the Program.
            devices: the devices.
            links: the costs of transfers between them.
            watts: their power; None: irrelevant.
            asked: the objective, and when devices are chosen.
            hand_over_ns: the cost of handing a segment to another thread.
        """
        self._bound, self._devices, self._links = bound, devices, links
        self._watts, self._asked, self._hand_over_ns = watts, asked, hand_over_ns
        self._reserved = [0] * len(devices.names)  # bytes by device, beside the weights of tasks

    def tasks(
        self, costs_ns: Sequence[Sequence[float | None]], *, counts_values: bool = False
    ) -> ProgramTasks:
        """The Program's tasks for these devices.

        Args:
            costs_ns: by device, the cost of each launch; None: it cannot run there.
            counts_values: as `program_tasks`.

        Raises:
            PlanError: a launch can run nowhere.
        """
        devices = self._devices
        processors = []
        for at, (name, backend) in enumerate(zip(devices.names, devices.backends, strict=True)):
            limit = backend.machine(devices.memories[at].device.index).memory_bytes
            reserved = 0 if counts_values else self._reserved[at]
            watts = Watts(0.0, 0.0) if self._watts is None else self._watts[at]
            room = max(0, limit - reserved) if limit else None
            processors.append(Processor(name, room, watts.busy, watts.idle))
        return program_tasks(
            self._bound.program,
            list(zip(*costs_ns, strict=True)),
            processors,
            self._links,
            devices.home,
            has_ends=devices.has_others,
            counts_values=counts_values,
        )

    def placed(self, tasks: ProgramTasks) -> TaskPlacement:
        """The best placement of tasks for the objective.

        Raises:
            PlanError: they do not fit the devices, by the known sizes of tasks.
        """
        return place_tasks(
            tasks.graph, objective=self._asked.objective, max_slowdown=self._asked.max_slowdown
        )

    def grouped(
        self, bound: BoundProgram, tasks: ProgramTasks, placement: TaskPlacement
    ) -> list[PlacedGroup]:
        """The segments of a placement."""
        return grouped(
            bound,
            self._devices,
            tasks,
            placement,
            kind=self._asked.placement,
            hand_over_ns=self._hand_over_ns,
        )

    def fitted(
        self, costs_ns: Sequence[Sequence[float | None]]
    ) -> tuple[ProgramTasks, TaskPlacement]:
        """A placement that fits each memory, including all that segments hold.

        First by weights alone, an underestimate; then by all that launches use, an overestimate
        where lifetimes do not overlap; then by weights, with room reserved for what was missing.

        Args:
            costs_ns: as `tasks`.

        Raises:
            PlanError: no placement was found; the message says what the last one takes.
        """
        limits = memory_limits(self._devices)
        last_found = ""
        for number in range(_MOST_TRIES):
            try:
                tasks = self.tasks(costs_ns, counts_values=number == 1)
                placement = self.placed(tasks)
            except PlanError as error:
                if number == 1:
                    continue
                raise PlanError(f"{error}{last_found}") from None
            groups = self.grouped(self._bound, tasks, placement)
            taken = taken_bytes(self._bound.program, groups, self._devices, limits)
            full = {one: taken[one] for one in limits if taken[one] > limits[one]}
            if not full:
                return tasks, placement
            last_found = "; the placement that was found last takes " + ", ".join(
                f"{show_bytes(taken[one])} of {show_bytes(limits[one])} on {one.device}"
                for one in limits
            )
            if number != 1:
                self._reserve(tasks, placement, full)
        raise PlanError(f"no placement was found that fits the devices' memory{last_found}")

    def _reserve(
        self, tasks: ProgramTasks, placement: TaskPlacement, taken: Mapping[Memory, int]
    ) -> None:
        """Reserve room on devices for what segments hold beside the weights that tasks count."""
        for at, memory in enumerate(self._devices.memories):
            if memory in taken:
                weights = sum(
                    task.memory_bytes
                    for task, one in zip(tasks.graph.tasks, placement.processors, strict=True)
                    if one == at
                )
                self._reserved[at] = max(taken[memory] - weights, self._reserved[at] + 1)
