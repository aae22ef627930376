"""An executable whose launches run on several devices, as segments with dependencies."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import CancelledError
from typing import Any, NoReturn

from offload.errors import BindingError, CopyError, DependencyError, ExecutionError, TimelineError
from offload.interpreter.outside_graphs import outside_graphs
from offload.plan.task_placement import TaskPlacement
from offload.program import BoundProgram
from offload.run.deferred import refuse_in_callback, when_ended
from offload.run.device_choice import DeviceChoice
from offload.run.executable import Executable
from offload.run.placed_executions import PlacedExecutions
from offload.run.placed_explanation import moved_lines, segment_lines, transfer_lines
from offload.run.placed_queue import Asked, PlacedQueue, PlacedSegment, Queued, home_memory
from offload.run.placed_results import PlacedResults
from offload.run.placed_timeline import placed_timeline
from offload.run.segment_dispatch import SegmentDispatcher
from offload.run.submitting import Args, Kwargs, Submitting, tickets_in, with_results
from offload.run.task_threads import in_callable
from offload.run.ticket import Ticket
from offload.run.transfers import Memory
from offload.run.under_way import refuse_at_exit
from offload.run.weight_copies import WeightCopies
from offload.run.whole_binding import whole_binding
from offload.run.whole_segment import WholeSegment
from offload.timeline import Timeline


class PlacedExecutable(Submitting):
    """A Program on several devices. Made by `Captured.load(device=[...])`.

    Each segment is an Executable on its device, and is queued there at once: it waits for those
    whose results it reads, without the caller. So submissions of several calls overlap on different
    devices. Where executions leave state (written inputs or weights, drawn numbers) each begins
    when the one before has ended.

    Owner of the segments' Executables. Calls from several threads are safe. Calls are those of an
    Executable of one device, without `out` and `feature_map`, and raise the same errors; where
    several segments fail, the error of the first. Tickets of several segments cannot be cancelled.

    Attributes:
        bound, program: the whole program.
        placement: where launches run, why, and what the alternatives would cost.
        segments: in an order in which they may run; a single segment is called as the whole.
        choice: the device of each segment, and the paces of devices.
    """

    def __init__(
        self,
        bound: BoundProgram,
        placement: TaskPlacement,
        segments: Sequence[PlacedSegment],
        choice: DeviceChoice,
        untimed: Set[int] = frozenset(),
        *,
        notes: Sequence[str] = (),
        memories: Sequence[Memory] = (),
        copies: WeightCopies | None = None,
    ) -> None:
        """Take over the segments' Executables.

        Args:
            bound: the whole program.
            placement: as it was planned.
            segments: its segments, in parts where they may be moved.
            choice: among the devices of each segment.
            untimed: devices that queue work, whose executions report no durations.
            notes: sentences for `explain`.
            memories: of each device, one of them the caller's; empty: all share the caller's.
            copies: of weights, in memories other than the caller's.
        """
        self.bound, self.program = bound, bound.program
        self.placement = placement
        self.choice = choice
        self.segments = tuple(segments)
        self._leaves_something = bound.program.leaves_something
        self._notes = tuple(notes)
        self._waiting: dict[Ticket, None] = {}  # submissions whose arguments are not known yet
        home = home_memory(self.program, memories)
        n_devices = len(placement.graph.processors)
        self._queue = PlacedQueue(
            self.program, self.segments, memories or (home,) * n_devices, home, copies
        )
        self._has_others = any(memory is not home for _, memory in self._placed_runs())
        self._whole = None
        if len(self.segments) == 1 and self.segments[0].slice.bound is bound:
            self._whole = WholeSegment(self.segments[0], choice, untimed)
        self._dispatcher = None
        if choice.is_dynamic and self.segments and self._whole is None:
            self._dispatcher = SegmentDispatcher(
                self.program, self.segments, self._queue, choice, untimed=untimed
            )
        self._executions = PlacedExecutions(
            self.program,
            self.segments,
            self._queue,
            choice,
            untimed=untimed,
            dispatcher=self._dispatcher,
        )
        self._copies = copies
        refusals = (one.rebinding_refusal for one, memory in self._placed_runs() if memory is home)
        self._binding = whole_binding(bound, next(filter(None, refusals), ""))
        self._results = PlacedResults(bound, self.segments)
        _alive.add(self)

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute, and return what the model returns.

        Raises:
            ExecutionError: also in a done-callback, where several segments cannot be waited for.
        """
        _refuse_buffers(kwargs)
        if self._whole is not None:
            return self._whole.called(args, kwargs)
        refuse_in_callback()
        self._refuse_inside_launch()
        queued = self._queued(args, kwargs, self._asked(()))
        try:  # all have ended before an error is raised
            error = _origin([one._outcome() for one in queued.tickets])
        except BaseException as interrupted:
            self._executions.observe(queued.devices, interrupted)
            raise
        self._executions.observe(queued.devices, error)
        if error is not None:
            raise error
        return self._results.of(queued)

    @outside_graphs
    def close(self) -> None:
        """Wait for executions in flight, and free the segments; later executions fail.

        Called in one of its own launches it does not wait, and the segments are freed when it is
        closed again or dropped.

        Raises:
            ExecutionError: called in a done-callback, whose thread may have to do the awaited work.
        """
        inside = [run for run in self._runs() if run._native.is_inside_launch]
        if not inside:
            refuse_in_callback()
            if not in_callable():
                for one in list(self._waiting):
                    one._outcome()
        self._executions.close()
        if self._dispatcher is not None and not inside and not in_callable():
            self._queue.under_way.wait()  # segments that have not begun need their executables
        for run in inside or self._runs():
            run.close()
        if not inside and not in_callable():
            self._queue.close()

    def _runs(self) -> Iterator[Executable]:
        return (run for run, _ in self._placed_runs())

    def _placed_runs(self) -> Iterator[tuple[Executable, Memory]]:
        for one in self.segments:
            for run, memory in zip(one.runs, self._queue.memories, strict=True):
                if run is not None:
                    yield run, memory

    def _notice_fork(self) -> None:
        """Renew, in the child of a fork, what threads of the parent may have held."""
        self._executions.notice_fork()
        for one in (self._dispatcher, self._whole):
            if one is not None:
                one.notice_fork()

    @property
    def closed(self) -> bool:
        """Whether it is closed to executions."""
        return self._executions.closed

    def noted(self, notes: Sequence[str]) -> PlacedExecutable:
        """Return itself, with other sentences for `explain`."""
        self._notes = tuple(notes)
        return self

    @outside_graphs
    def explain(self) -> str:
        """Describe where each segment is and why, and what was measured."""
        lines = [
            self.placement.explain(),
            *self._notes,
            *segment_lines(self.placement, self.segments),
            *transfer_lines(self.program, self.segments, self._queue, self._copies),
            *moved_lines(
                self.placement,
                self.choice,
                self._dispatcher.n_moved if self._dispatcher is not None else 0,
            ),
        ]
        return "\n".join(lines)

    @contextlib.contextmanager
    @outside_graphs
    def timeline(self, *, executions: int | None = None) -> Iterator[Timeline]:
        """Record the executions inside a with-block, submitted by one thread.

        Nothing may be in flight at its beginning, and all executions must be waited for inside it.

        Args:
            executions: how many the block must hold, at least 1. Any number if not given.

        Yields:
            A Timeline, filled when the block ends: a lane for each device, and one for the
            transfers of each direction.

        Raises:
            TimelineError: segments may be moved; or the block held more or fewer executions, or
                some that failed.
            ExecutionError: another timeline is being recorded.
        """
        if not self.choice.is_static or not self.segments:
            raise TimelineError(
                "timeline: expected segments that stay on their devices: load with "
                "placement='static'"
            )
        names = [one.name for one in self.placement.graph.processors]
        with placed_timeline(self.segments, names, self._queue) as found:
            yield found
        if executions not in (None, len(found.executions)):
            raise TimelineError(
                f"expected {executions:,} executions inside the with-block of timeline(), got "
                f"{len(found.executions):,}"
            )

    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, as `Executable.rebind_weights`.

        Weights on other devices are copied there again by the next execution: call it also after
        writes that torch does not count.

        Executions under way end first, so that none reads old and new weights.

        Raises:
            BindingError: a new storage does not fit; no segment uses another one then.
            ExecutionError: executions are under way, and it was called in one of its launches, in a
                task or in a done-callback, for which they may wait.
        """
        while True:
            with self._executions.lock:
                under_way = self._queue.under_way.tickets()
                if not under_way:
                    self._rebind()
                    return
            if in_callable() or any(run._native.is_inside_launch for run in self._runs()):
                raise ExecutionError(
                    "rebind_weights: it waits for executions under way, which may wait for the "
                    "task or launch that calls it: call it outside"
                )
            refuse_in_callback()
            for one in under_way:
                one._outcome()

    def _rebind(self) -> None:
        """Rebind all segments; where one fails, later calls are refused until all have."""
        runs = [run for run, memory in self._placed_runs() if memory is self._queue.home]
        self._binding.check_layouts()
        for run in runs:
            run.check_rebinding()
        for run in runs:
            run.rebind_weights()
        if self._copies is not None:
            self._copies.copy_all_again()
        self._binding.rebind_weights()
        self._results.rebind()

    @outside_graphs
    def _submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        """Queue the segments; where executions leave state, wait for the given tickets."""
        _refuse_buffers(kwargs)
        if self._whole is not None:
            return self._whole.submitted(args, kwargs, after)
        self._refuse_inside_launch()
        given = tickets_in(args, kwargs)
        whole = Ticket()
        whole._begin()  # segments may have begun, and what they write must not be left incomplete
        if self._leaves_something:
            for one in given:
                one._outcome()
        if all(one.done() for one in given):
            self._queue_for(whole, args, kwargs, self._asked(after))
        else:
            asked = self._asked(after, is_later=True)
            self._waiting[whole] = None
            whole._waits_for = given
            whole._call_when_done(lambda: self._waiting.pop(whole, None))
            when_ended(given, lambda: _ending(whole, self._queue_for, args, kwargs, asked))
        return whole

    def _refuse_inside_launch(self) -> None:
        if self._dispatcher is not None:  # else the segments' executables refuse it
            self._dispatcher.refuse_inside_launch()

    def _asked(self, after: Sequence[Ticket], *, is_later: bool = False) -> Asked:
        """Collect this thread's state for an execution; `is_later`: another thread queues it.

        Raises:
            BindingError: torch is in another state than when the program was recorded.
        """
        caller = self._binding.surroundings()
        ready = self._queue.home.mark() if self._has_others else None
        if self._dispatcher is not None:
            by_device = self._dispatcher.surroundings(caller)
            return Asked(tuple(after), caller, {}, ready, by_device)
        found = {id(run): run._surroundings() for run in self._runs()} if is_later else {}
        return Asked(tuple(after), caller, found, ready)

    def _queue_for(self, whole: Ticket, args: Args, kwargs: Kwargs, asked: Asked) -> None:
        """Queue the segments; the ticket ends when all of them have."""
        whole._waits_for = ()
        if any(whole._fail_as(one) for one in tickets_in(args, kwargs)):
            return
        args, kwargs = with_results(args, kwargs, Ticket.result)
        queued = self._queued(args, kwargs, asked)
        when_ended(queued.tickets, lambda: _ending(whole, self._end, queued))

    def _end(self, whole: Ticket, queued: Queued) -> None:
        errors = [one._outcome() for one in queued.tickets]
        error = _origin(errors)
        self._executions.observe(queued.devices, error)
        if isinstance(error, (DependencyError, CancelledError)):
            whole._fail_as(queued.tickets[errors.index(error)])
        elif error is not None:
            whole._set_error(error)
        else:
            whole._set_result(self._results.of(queued))

    def _queued(self, args: Args, kwargs: Kwargs, asked: Asked) -> Queued:
        refuse_at_exit()
        if self.closed:
            raise ExecutionError("the executable is closed")
        return self._executions.queued(self._binding.checked(args, kwargs, asked.caller), asked)

    @outside_graphs
    def __enter__(self) -> PlacedExecutable:
        return self

    @outside_graphs
    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "an executable lies in its devices' memory, and cannot be copied or pickled: load the "
            "captured program once more"
        )


_alive: weakref.WeakSet[PlacedExecutable] = weakref.WeakSet()


def _notice_fork() -> None:
    for one in _alive:
        one._notice_fork()


os.register_at_fork(after_in_child=_notice_fork)


# Registered after, so called before, executions are refused at exit: these are still queued.
@atexit.register
def _queue_what_waits() -> None:
    for one in list(_alive):
        for ticket in list(one._waiting):
            ticket._outcome()


def _refuse_buffers(kwargs: Kwargs) -> None:
    for name in ("out", "feature_map"):
        if name in kwargs:
            raise BindingError(
                f"{name}: an executable on several devices does not support it: leave it out"
            )


def _ending(whole: Ticket, function: Callable[..., None], *args: Any) -> None:
    """Call a function for a ticket; an error ends the ticket."""
    try:
        function(whole, *args)
    except BaseException as error:
        whole._set_error(error)


def _origin(errors: Sequence[Exception | None]) -> Exception | None:
    """Return the first error that is not the consequence of another; None without errors."""
    failed = [one for one in errors if one is not None]
    own = [one for one in failed if not isinstance(one, (DependencyError, CancelledError))]
    return next(iter((*own, *failed)), None)
