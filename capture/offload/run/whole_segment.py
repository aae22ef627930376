"""A Program that is one segment: each execution is one of an Executable, on one of the devices."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from typing import Any

from offload.run.device_choice import DeviceChoice
from offload.run.executable import Executable
from offload.run.placed_queue import PlacedSegment
from offload.run.submitting import Args, Kwargs
from offload.run.ticket import Ticket


class WholeSegment:
    """Executes the whole on the device that is chosen for each execution.

    A Program that leaves state stays on the first device, which keeps the order.

    Owner: a PlacedExecutable, which closes the Executables. Thread: any.
    """

    def __init__(self, segment: PlacedSegment, choice: DeviceChoice, untimed: Set[int]) -> None:
        """Execute this segment; no durations are read from the `untimed` devices."""
        self._segment, self._choice, self._untimed = segment, choice, untimed
        self._lock = threading.Lock()

    def called(self, args: Args, kwargs: Kwargs) -> Any:
        """Execute on this thread, and return what the model returns.

        Raises:
            OffloadError: as an Executable.
        """
        if self._choice.is_static:
            return self._planned(*args, **kwargs)
        (device,) = self._chosen()
        try:
            result = self._segment.run(device)(*args, **kwargs)
        except BaseException as error:
            self._observe(device, error)
            raise
        self._observe(device, None)
        return result

    def submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        """Queue an execution behind the given tickets.

        Raises:
            OffloadError: as an Executable.
        """
        if self._choice.is_static:
            return self._planned._submitted(args, kwargs, after)
        (device,) = self._chosen()
        try:
            ticket = self._segment.run(device)._submitted(args, kwargs, after)
        except BaseException as error:
            self._observe(device, error)
            raise
        ticket._call_when_done(lambda: self._observe(device, ticket._outcome()))
        return ticket

    def notice_fork(self) -> None:
        """Renew, in the child of a fork, what threads of the parent may have held."""
        self._lock = threading.Lock()

    @property
    def _planned(self) -> Executable:
        return self._segment.run(self._segment.costs.planned)

    def _chosen(self) -> Sequence[int]:
        with self._lock:
            return self._choice.choose()

    def _observe(self, device: int, error: BaseException | None) -> None:
        took_ns = None
        if error is None and device not in self._untimed:
            took_ns = self._segment.run(device).last_execution.device_ns
        with self._lock:
            if error is not None:
                self._choice.failed()
            else:
                self._choice.ended([device], [took_ns])
