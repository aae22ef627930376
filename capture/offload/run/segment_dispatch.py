"""Segments that are given to devices one by one, when they are ready."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch

from offload.errors import ExecutionError
from offload.interpreter.native_layouts import native_layout
from offload.interpreter.outside_graphs import outside_graphs
from offload.native import _native
from offload.plan.placed_transfers import INPUTS
from offload.program import Program, TensorView
from offload.run.deferred import when_ended
from offload.run.device_choice import DeviceChoice
from offload.run.executable import Executable
from offload.run.placed_queue import (
    Asked,
    PlacedQueue,
    PlacedSegment,
    Queued,
    input_bytes,
    transfer_name,
)
from offload.run.ticket import Ticket
from offload.run.transfers import Links, Memory, Piece

_NO_VALUE = -1


@dataclasses.dataclass(frozen=True, slots=True)
class CopyOrder:
    """What the copies of an execution wait for. The native execution refers to it.

    Attributes:
        number: of the execution, for timelines.
        ready: an event behind the submitting thread's earlier work on the caller's device; or None.
        allocated: an event behind the allocations of that thread on the device; or None.
    """

    number: int
    ready: Any
    allocated: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """An execution whose segments begin one by one.

    Attributes:
        native: its tensors, and the proof of its steps.
        done: ends with the execution.
        order: of its copies.
    """

    native: _native.DispatchedExecution
    done: Ticket
    order: CopyOrder


class SegmentDispatcher:
    """Begins segments on devices when they are ready and the device is idle.

    Which segment begins where is decided, proved and carried out by a native SegmentDispatcher, on
    the thread that ended something and without Python. Copies between memories are made by this
    module, on the threads of links. What does not change from one execution to the next is decided
    here, once.

    Owner: a PlacedExecutable. Thread: any; `prepare` with its lock.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[PlacedSegment],
        queue: PlacedQueue,
        choice: DeviceChoice,
        *,
        untimed: Set[int],
    ) -> None:
        """Begin without executions.

        Args:
            program: the whole program.
            segments: in an order in which they may run.
            queue: has the memories, and copies.
            choice: plans executions, and has the paces of devices.
            untimed: devices that report no durations.
        """
        self._program, self._queue, self._choice = program, queue, choice
        memory_of = choice.graph["memory_of"]
        self._memories = [
            queue.memories[memory_of.index(number)] for number in range(max(memory_of) + 1)
        ]
        self._others = {one for one in self._memories if one is not queue.home}
        self._on_device = [
            next((one.runs[device] for one in segments if one.runs[device] is not None), None)
            for device in range(len(memory_of))
        ]
        self._arguments = _arguments(program, segments, choice, untimed) | {
            "memories": [_place(one) for one in self._memories],
            "copy": _Copies(program, queue.links, self._memories),
            "links": [
                queue.links.link(*ends) for ends in itertools.product(self._memories, repeat=2)
            ],
        }
        self._native = _native.SegmentDispatcher(**self._arguments)

    def notice_fork(self) -> None:
        """Forget the executions of the parent, in the child of a fork; they have ended there."""
        self._native.abandon()
        self._choice.notice_fork()
        self._native = _native.SegmentDispatcher(**self._arguments)

    @property
    def n_moved(self) -> int:
        """Segments that were given to another device than planned at the submission."""
        return self._native.n_moved

    @property
    def n_under_way(self) -> int:
        """Executions that have begun and not ended."""
        return self._native.n_under_way

    def refuse_inside_launch(self) -> None:
        """Refuse to execute in a launch of a segment, whose device the execution may wait for.

        Raises:
            ExecutionError: this thread is in such a launch.
        """
        if self._native.is_inside_launch:
            raise ExecutionError(
                "a launch of this executable executes the executable itself: load the program "
                "again, and let the launch execute that one"
            )

    def surroundings(self, caller: _native.Surroundings) -> tuple[_native.Surroundings, ...]:
        """Return this thread's state by device; `caller`: its state on the recorded device.

        Raises:
            BindingError: torch is in another state than when the program was recorded.
        """
        return tuple(caller if one is None else one._surroundings() for one in self._on_device)

    def prepare(
        self, devices: Sequence[int], given: Sequence[torch.Tensor], asked: Asked
    ) -> tuple[Dispatched, Queued]:
        """Allocate what the caller receives, and take the state of this thread.

        The caller holds the lock, and then calls `begin` without it.

        Raises:
            OutOfMemory: there is no room for the results.
            ExecutionError: a device has failed before.
        """
        queue = self._queue
        for memory in self._memories:
            memory.check()
        queue.n_queued += 1
        refreshed = (
            queue.weights.tickets(self._others, asked.ready, queue.n_queued) if self._others else {}
        )
        inputs = [
            input_bytes(one, view) for view, one in zip(self._program.inputs, given, strict=True)
        ]
        done, pins = Ticket(), _native.HeldStorages(list(given))
        done._begin()  # segments may have begun, and what they write must not be left incomplete
        native = self._native.prepare(
            inputs, asked.by_device, [refreshed.get(one, ()) for one in self._memories], pins, done
        )
        queue.under_way.note([done])
        if self._others:
            queue.weights.note_reader(done)
        allocated = queue.home.mark() if self._others else None
        views = (view.value for view in self._program.inputs)
        held = dict(zip(views, inputs, strict=True)) | self._native.returned(native)
        found = Dispatched(native, done, CopyOrder(queue.n_queued, asked.ready, allocated))
        return found, Queued(devices, (done,), given, held, {}, pins)

    def begin(self, execution: Dispatched, devices: Sequence[int], after: Sequence[Ticket]) -> None:
        """Begin an execution once the tickets that it waits for have ended."""

        def begin() -> None:
            for one in after:
                if execution.done._fail_as(one):
                    self._choice.failed()
                    return
            self._native.add(execution.native, devices, execution.order)

        when_ended(after, begin)


class _Copies:
    """Makes the copies of dispatched executions, on the threads of links."""

    def __init__(self, program: Program, links: Links, memories: Sequence[Memory]) -> None:
        self._values, self._links, self._memories = program.values, links, tuple(memories)

    @outside_graphs
    def __call__(  # noqa: PLR0917 - called by the native dispatcher
        self,
        order: CopyOrder,
        producer: int,
        origin: int,
        target: int,
        values: Sequence[int],
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
    ) -> None:
        """Copy what a segment, or the caller, has made from one memory to another."""
        ends = self._memories[origin], self._memories[target]
        self._links.carry_out(
            *ends,
            [Piece(*one) for one in pieces],
            lambda: transfer_name([self._values[one] for one in values], *ends),
            number=order.number,
            ready=(order.ready if producer == INPUTS else None, order.allocated),
        )


def _arguments(
    program: Program, segments: Sequence[PlacedSegment], choice: DeviceChoice, untimed: Set[int]
) -> dict[str, Any]:
    """The arguments of a native SegmentDispatcher, whose Values are numbered from 0."""
    used = (value for one in segments for value in (*one.slice.inputs, *one.slice.outputs))
    names = list(dict.fromkeys(used))
    number_of = {value: number for number, value in enumerate(names)}

    def numbers(values: Sequence[int]) -> list[int]:
        return [number_of[value] for value in values]

    returned = {result.view.value for result in program.results}
    groups = list(_groups(segments, choice, returned))
    group_of = {value: at for at, group in enumerate(groups) for value in group}
    values = []
    for name in names:
        one = program.values[name]
        layout = native_layout(TensorView(name, 0, one.shape, one.strides, one.dtype))
        values.append((layout, one.size_bytes, name in returned, group_of.get(name, 0)))
    return {
        "graph": choice.graph,
        "is_throughput": choice.is_throughput,
        "inputs": [numbers(one.slice.inputs) for one in segments],
        "outputs": [numbers(one.slice.outputs) for one in segments],
        "names": names,
        "values": values,
        "groups": [numbers(one) for one in groups],
        "shared": [numbers(one.values) for one in choice.shared],
        "sites": [
            _site(run, cost_ns or 0.0, is_timed=device not in untimed)
            for one in segments
            for device, (run, cost_ns) in enumerate(zip(one.runs, one.costs.costs_ns, strict=True))
        ],
        "given": [number_of.get(view.value, _NO_VALUE) for view in program.inputs],
        "paces": choice.native_paces,
    }


def _groups(
    segments: Sequence[PlacedSegment], choice: DeviceChoice, returned: Set[int]
) -> Iterator[tuple[int, ...]]:
    """How Values lie in memory: those with the same readers together, returned ones alone."""
    grouped: set[int] = set()
    for one in choice.shared:
        if one.producer == INPUTS:
            continue
        grouped.update(one.values)
        if returned.isdisjoint(one.values):
            yield one.values
        else:
            yield from ((value,) for value in one.values)
    for segment in segments:
        yield from ((value,) for value in segment.slice.outputs if value not in grouped)


def _site(run: Executable | None, cost_ns: float, *, is_timed: bool) -> tuple[Any, ...] | None:
    if run is None:
        return None
    has_buffers = any(one.is_copied for one in run.copy_choices)
    return run._native, run, cost_ns, is_timed, run._loaded.draw, has_buffers


def _place(memory: Memory) -> tuple[str, tuple[int, int, int] | None, bool]:
    stream = memory.stream
    number = None if stream is None else (stream.stream_id, stream.device_index, stream.device_type)
    return str(memory.device), number, memory.pinned
