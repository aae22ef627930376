"""Executions of segments: on devices that are chosen for each, in order where they leave state."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence, Set

import torch

from offload.errors import ExecutionError
from offload.program import Program
from offload.run.deferred import end_of
from offload.run.device_choice import DeviceChoice
from offload.run.placed_queue import Asked, PlacedQueue, PlacedSegment, Queued
from offload.run.segment_dispatch import SegmentDispatcher
from offload.run.ticket import Ticket


class PlacedExecutions:
    """Chooses the devices of each execution, queues it, and observes what it took.

    Where executions leave state (written inputs or weights, drawn numbers) each begins when the one
    before has ended.

    Owner: a PlacedExecutable. Thread: any.

    Attributes:
        lock: held while an execution is queued, so that its holder sees all or nothing of it.
        closed: whether no execution is to begin any more.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[PlacedSegment],
        queue: PlacedQueue,
        choice: DeviceChoice,
        *,
        untimed: Set[int],
        dispatcher: SegmentDispatcher | None,
    ) -> None:
        """Begin without executions.

        Args:
            program: the whole program.
            segments: in an order in which they may run.
            queue: queues all segments of an execution at once.
            choice: of the devices of each execution.
            untimed: devices that report no durations.
            dispatcher: begins segments one by one instead; None: it does not.
        """
        self.lock = threading.Lock()
        self.closed = False
        self._leaves_something = program.leaves_something
        self._segments = segments
        self._queue = queue
        self._choice = choice
        self._untimed = untimed
        self._dispatcher = dispatcher
        self._before: tuple[Ticket, ...] = ()  # the one before, where executions leave state

    def queued(self, given: Sequence[torch.Tensor], asked: Asked) -> Queued:
        """Queue an execution of checked inputs.

        Raises:
            ExecutionError: the executable is closed, or a segment cannot begin.
        """
        if self._dispatcher is not None:
            return self._dispatched(self._dispatcher, given, asked)
        with self.lock:
            self._check_open()
            devices = self._choice.choose()
            try:
                return self._queued_on(devices, given, asked)
            except BaseException:
                self._choice.failed()
                raise

    def _check_open(self) -> None:
        if self.closed:
            raise ExecutionError("the executable is closed")

    def _dispatched(
        self, dispatcher: SegmentDispatcher, given: Sequence[torch.Tensor], asked: Asked
    ) -> Queued:
        """Begin an execution whose segments begin one by one; its one ticket is that of all."""
        with self.lock:
            self._check_open()
            devices = self._choice.choose()
            try:
                if self._leaves_something:
                    after = (*asked.after, *end_of(self._before))
                    asked = dataclasses.replace(asked, after=after)
                execution, queued = dispatcher.prepare(devices, given, asked)
            except BaseException:
                self._choice.failed()
                raise
            self._before = tuple(queued.tickets) if self._leaves_something else ()
        dispatcher.begin(execution, devices, asked.after)
        return queued

    def _queued_on(
        self, devices: Sequence[int], given: Sequence[torch.Tensor], asked: Asked
    ) -> Queued:
        if not self._leaves_something:
            return self._queue.queued(devices, given, asked)
        after = (*asked.after, *end_of(self._before))
        begun: list[Ticket] = []
        try:
            found = self._queue.queued(
                devices, given, dataclasses.replace(asked, after=after), begun
            )
        except BaseException:  # what it had queued may end before the execution before it
            self._before += tuple(begun)
            raise
        self._before = tuple(begun)
        return found

    def observe(self, devices: Sequence[int], error: BaseException | None) -> None:
        """Record the segments' latest durations: of other calls, where calls overlap."""
        if self._choice.is_static or self._dispatcher is not None:
            return
        if error is not None:
            with self.lock:
                self._choice.failed()
            return
        took_ns = [
            None if device in self._untimed else one.run(device).last_execution.device_ns
            for one, device in zip(self._segments, devices, strict=True)
        ]
        with self.lock:
            self._choice.ended(devices, took_ns)

    def close(self) -> None:
        """Let no execution begin any more; those that are being queued have been before."""
        with self.lock:
            self.closed = True

    def notice_fork(self) -> None:
        """Renew, in the child of a fork, what threads of the parent may have held."""
        self.lock = threading.Lock()
