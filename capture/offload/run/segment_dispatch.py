"""Segments that are given to devices one by one, when they are ready."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from offload.errors import DependencyError
from offload.native import _native
from offload.plan.check_dispatch import DispatchCheck, DispatchRules
from offload.plan.placed_transfers import INPUTS, PlacedTransfer
from offload.program import Program
from offload.run.alarm import ALARM
from offload.run.deferred import when_ended
from offload.run.device_choice import DeviceChoice
from offload.run.executable import Executable
from offload.run.placed_queue import (
    Asked,
    Held,
    PlacedQueue,
    PlacedSegment,
    Queued,
    Route,
    input_bytes,
)
from offload.run.ticket import Ticket
from offload.run.transfers import Memory

_BEGIN, _COPY, _END = range(3)  # DispatchCommand::Kind

Command = tuple[int, int, int, int, list[int]]
"""A kind, an execution, a segment or producer, a device or memory, and shared Values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A segment on a device that has it.

    Attributes:
        run: its executable there.
        memory, number: the device's memory, and its number.
        cost_ns: the expected duration.
        inputs, outputs: the keys in `held` of what it reads and makes.
    """

    run: Executable
    memory: Memory
    number: int
    cost_ns: float
    inputs: tuple[tuple[int, Memory], ...]
    outputs: tuple[tuple[int, Memory], ...]


@dataclasses.dataclass(slots=True)
class Dispatched:
    """An execution of which segments begin one by one.

    Attributes:
        asked: the state of the thread that submitted it.
        held: the memory of Values, by Value and memory.
        refreshed: tickets of weights that are copied again, by memory.
        allocated: an event behind the allocations of the submitting thread, on the device.
        check: proves each step.
        done: ends with the execution.
        pins: keep the inputs' memory where it is.
        number: of the native dispatch; -1: nothing may begin yet.
        devices: of the segments that have begun.
        errors: of its segments, copies and steps.
    """

    asked: Asked
    held: Held
    refreshed: Mapping[Memory, Sequence[Ticket]]
    allocated: Any
    check: DispatchCheck
    done: Ticket
    pins: _native.HeldStorages
    number: int = -1
    devices: dict[int, int] = dataclasses.field(default_factory=dict)
    errors: list[Exception] = dataclasses.field(default_factory=list)


Ended = tuple[Dispatched, Command, Ticket | None, Exception | None]
"""What has ended of an execution: its ticket, or the error for which it could not begin."""


class SegmentDispatcher:
    """Begins segments on devices when they are ready and the device is idle.

    Which segment begins where is decided by a native SegmentDispatch; this class carries that out.
    What has ended is noted by the thread that ended it, and one thread at a time acts on it: it
    never waits, neither for a lock nor for a ticket.

    Owner: a PlacedExecutable. Thread: any, without its lock.

    Attributes:
        n_moved: segments that were given to another device than planned when they were submitted.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[PlacedSegment],
        queue: PlacedQueue,
        choice: DeviceChoice,
        *,
        untimed: Set[int],
        lock: threading.Lock,
    ) -> None:
        """Begin without executions.

        Args:
            program: the whole program.
            segments: in an order in which they may run.
            queue: allocates memory, and copies.
            choice: plans executions, and has the paces of devices.
            untimed: devices that report no durations.
            lock: guards `choice`.
        """
        self._program, self._segments, self._queue = program, tuple(segments), queue
        self._choice, self._untimed, self._lock = choice, untimed, lock
        self._shared = choice.dispatch()[1]
        returned = {result.view.value for result in program.results}
        self._rules = DispatchRules(
            [one.slice.inputs for one in segments],
            [one.slice.outputs for one in segments],
            [one.costs.after for one in segments],
            queue.number_of(queue.home),
            returned,
        )
        self._returned = returned
        self._route = self._groups()
        self._group_of = {
            value: group for groups in self._route.groups for group in groups for value in group
        }
        self._sites = self._found_sites()
        self._wake_up = weakref.WeakMethod(self._woken)
        self._clear()

    def _clear(self) -> None:
        self._dispatch = self._choice.dispatch()[0]
        self._executions: dict[int, Dispatched] = {}
        self._events: deque[Callable[[], None] | Ended] = deque()
        self._acting = threading.Lock()
        self._armed_at_ns = float("inf")

    def notice_fork(self, lock: threading.Lock) -> None:
        """Forget the executions of the parent, in the child of a fork; they have ended there."""
        self._lock = lock
        self._clear()

    @property
    def n_moved(self) -> int:
        """Segments that were given to another device than planned at the submission."""
        return self._dispatch.n_moved

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
        for memory in queue.memories:
            memory.check()
        others = {one for one in queue.memories if one is not queue.home}
        held = {
            (view.value, queue.home): input_bytes(one, view)
            for view, one in zip(self._program.inputs, given, strict=True)
        }
        values = self._program.values
        for one in self._segments:
            for value in one.slice.outputs:
                if value in self._returned or not others:
                    held[value, queue.home] = queue.home.empty(values[value])
        queue.n_queued += 1
        number = queue.n_queued
        refreshed = queue.weights.tickets(others, asked.ready, number) if others else {}
        done, pins = Ticket(), _native.HeldStorages(list(given))
        done._begin()  # segments may have begun, and what they write must not be left incomplete
        queue.note_execution([done])
        if others:
            queue.weights.note_reader(done)
        check = DispatchCheck(self._rules)
        allocated = queue.home.mark() if others else None
        found = Dispatched(asked, held, refreshed, allocated, check, done, pins)
        home = {value: tensor for (value, memory), tensor in held.items() if memory is queue.home}
        return found, Queued(devices, (done,), given, home, held, pins)

    def begin(self, execution: Dispatched, devices: Sequence[int]) -> None:
        """Begin an execution once the tickets that it waits for have ended."""
        after = execution.asked.after

        def begin() -> None:
            for one in after:
                if execution.done._fail_as(one):
                    with self._lock:
                        self._choice.failed()
                    return
            self._note(functools.partial(self._add, execution, devices))

        when_ended(after, begin)

    # ---- events -------------------------------------------------------------------------------

    def _note(self, event: Callable[[], None] | Ended) -> None:
        self._events.append(event)
        self._act()

    def _woken(self) -> None:
        self._armed_at_ns = float("inf")
        self._note(lambda: None)

    def _act(self) -> None:
        """Act on events, unless another thread does, or this one further up."""
        events, acting = self._events, self._acting  # a launch or callback may fork
        while events and acting.acquire(blocking=False):
            try:
                while events:
                    event = events.popleft()
                    if not isinstance(event, tuple):
                        event()
                    elif event[1][0] == _BEGIN:
                        self._segment_ended(event)
                    else:
                        self._copy_ended(event)
                    if not events:
                        self._step()
            finally:
                acting.release()

    def _step(self) -> None:
        """Carry out what is to be done now."""
        dispatch = self._dispatch
        for command in dispatch.next(self._choice.paces, time.monotonic_ns()):
            kind, number, what, to, values = command
            execution = self._executions[number]
            if kind == _END:
                self._end(execution)
                continue
            try:
                if kind == _BEGIN:
                    ticket = self._begun(execution, what, to)
                else:
                    ticket = self._copied(execution, what, to, values)
            except Exception as error:
                self._events.append((execution, command, None, error))
            else:
                ended = (execution, command, ticket, None)
                ticket._call_when_done(functools.partial(self._note, ended))
        wake_at_ns = dispatch.wake_at_ns
        if wake_at_ns < self._armed_at_ns:
            self._armed_at_ns = wake_at_ns
            ALARM.call_at(wake_at_ns, self._wake_up)

    # ---- one execution ------------------------------------------------------------------------

    def _add(self, execution: Dispatched, devices: Sequence[int]) -> None:
        execution.number = self._dispatch.add(devices)
        self._executions[execution.number] = execution

    def _begun(self, execution: Dispatched, segment: int, device: int) -> Ticket:
        """Queue a segment on an idle device."""
        site, held = self._sites[segment][device], execution.held
        assert site is not None  # the plan has only devices with an executable
        execution.devices[segment] = device
        execution.check.begun(segment, site.number)
        for key in site.outputs:
            if key not in held:
                self._allocate(execution, self._group_of.get(key[0], key[:1]), site.memory)
        return site.run._submitted(
            tuple([held[key] for key in site.inputs]),
            {"out": tuple([held[key] for key in site.outputs])},
            tuple(execution.refreshed.get(site.memory, ())) if execution.refreshed else (),
            execution.asked.surroundings[id(site.run)],
        )

    def _allocate(self, execution: Dispatched, group: Sequence[int], memory: Memory) -> None:
        found = memory.block([self._program.values[value] for value in group])
        for value, tensor in zip(group, found, strict=True):
            execution.held[value, memory] = tensor

    def _copied(
        self, execution: Dispatched, producer: int, to: int, shared: Sequence[int]
    ) -> Ticket:
        """Queue a copy of what a segment, or the caller, has made."""
        queue = self._queue
        target = queue.memory(to)
        made_in = queue.home if producer == INPUTS else queue.memories[execution.devices[producer]]
        origin = queue.number_of(made_in)
        values = self._values(shared)
        execution.check.copied(producer, origin, to, values)
        for value in values:
            if (value, target) not in execution.held:
                group = (value,) if producer == INPUTS else self._group_of[value]
                self._allocate(execution, group, target)
        transfer = PlacedTransfer(producer, origin, to, values, ())
        ready = (execution.asked.ready if producer == INPUTS else None, execution.allocated)
        return queue.copied(transfer, self._route, execution.held, after=(), ready=ready)

    def _segment_ended(self, event: Ended) -> None:
        execution, (_, number, segment, device, _), ticket, error = event
        self._dispatch.segment_ended(number, segment)
        error = error if ticket is None else ticket._outcome()
        if error is not None:
            self._failed(execution, error)
            return
        execution.check.ended(segment)
        site = self._sites[segment][device]
        if site is None or device in self._untimed:
            return
        last = site.run._native.last_execution
        took_ns = last.device_ns - last.proof_ns
        with self._lock:
            self._choice.observe_at_once(device, site.cost_ns, took_ns)

    def _copy_ended(self, event: Ended) -> None:
        execution, (_, number, _, to, shared), ticket, error = event
        self._dispatch.copy_ended(number, to, shared)
        error = error if ticket is None else ticket._outcome()
        if error is not None:
            self._failed(execution, error)
            return
        execution.check.arrived(to, self._values(shared))

    def _failed(self, execution: Dispatched, error: Exception) -> None:
        execution.errors.append(error)
        self._dispatch.abandon(execution.number)

    def _end(self, execution: Dispatched) -> None:
        """End an execution of which nothing is left."""
        del self._executions[execution.number]
        with self._lock:
            if execution.errors:
                self._choice.failed()
            else:
                self._choice.left(set(execution.devices.values()))
        if not execution.errors:
            try:
                execution.check.finished()
            except Exception as error:
                execution.errors.append(error)
        if not execution.errors:
            execution.done._set_result(None)
            return
        own = [one for one in execution.errors if not isinstance(one, DependencyError)]
        execution.done._set_error((own or execution.errors)[0])

    # ---- values -------------------------------------------------------------------------------

    def _values(self, shared: Sequence[int]) -> tuple[int, ...]:
        return tuple(value for one in shared for value in self._shared[one].values)

    def _found_sites(self) -> list[tuple[Site | None, ...]]:
        queue = self._queue
        return [
            tuple(
                None
                if run is None
                else Site(
                    run,
                    memory,
                    queue.number_of(memory),
                    one.costs.costs_ns[device] or 0.0,
                    tuple((value, memory) for value in one.slice.inputs),
                    tuple((value, memory) for value in one.slice.outputs),
                )
                for device, (run, memory) in enumerate(zip(one.runs, queue.memories, strict=True))
            )
            for one in self._segments
        ]

    def _groups(self) -> Route:
        """How Values lie in memory: those with the same readers together, returned ones alone."""
        groups: list[list[tuple[int, ...]]] = [[] for _ in self._segments]
        for one in self._shared:
            if one.producer == INPUTS:
                continue
            is_alone = not self._returned.isdisjoint(one.values)
            groups[one.producer] += [(value,) for value in one.values] if is_alone else [one.values]
        return Route((), {}, tuple(map(tuple, groups)), frozenset())
