"""An executable whose launches run on several devices, as segments that wait for one another."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError
from typing import Any, NoReturn

import torch

from offload.console.amounts import show_count
from offload.errors import BindingError, CopyError, DependencyError, ExecutionError
from offload.interpreter.eager_run import tensor_at
from offload.interpreter.torch_names import find_dtype
from offload.native import _native
from offload.plan.task_placement import TaskPlacement
from offload.program import BoundProgram, TensorView
from offload.program.slice import Slice
from offload.program.structure import unflatten
from offload.run.arguments import tensors_of_call
from offload.run.deferred import end_of, in_callable, refuse_in_callback, when_ended
from offload.run.device_choice import DeviceChoice, SegmentCosts
from offload.run.executable import Executable
from offload.run.placed_inputs import Base, InputChecks
from offload.run.submitting import Args, Kwargs, Submitting, tickets_in, with_results
from offload.run.ticket import Ticket


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedSegment:
    """Launches in a row on one device.

    Attributes:
        slice: the launches as a Program by themselves.
        runs: by device what executes it there; None: it is not loaded there.
        costs: what it is expected to take, what it waits for, and where it is planned.
    """

    slice: Slice
    runs: tuple[Executable | None, ...]
    costs: SegmentCosts

    def run(self, device: int) -> Executable:
        """What executes it on a device that has it."""
        run = self.runs[device]
        assert run is not None  # the choice is made among those that it has costs for
        return run


@dataclasses.dataclass(frozen=True, slots=True)
class Queued:
    """An execution that is under way.

    Attributes:
        devices: of each segment.
        tickets: likewise.
        given: the tensors of the call, in the order of the Program's inputs.
        held: by Value the tensors of inputs, and of what segments give.
    """

    devices: Sequence[int]
    tickets: Sequence[Ticket]
    given: Sequence[torch.Tensor]
    held: Mapping[int, torch.Tensor]


class PlacedExecutable(Submitting):
    """A Program on several devices. Made by `Captured.load(device=[...])`.

    Each segment is an Executable on its device, and is queued there at once: it waits for those
    whose results it reads without the caller. So submissions of several calls overlap, on different
    devices. Where executions leave something (written inputs or weights, drawn numbers) each begins
    when the one before has ended.

    Owner of the segments' Executables. Calls from several threads are safe. Called as an Executable
    of one device, without `out` and `feature_map`. It raises what that raises; of several segments
    that fail the error of the first. Tickets of several segments cannot be cancelled.

    Attributes:
        bound, program: the whole.
        placement: where launches are, why, and what the alternatives would cost.
        segments: in an order in which they may run; a single one is called as the whole.
        choice: which device executes each segment, and how quick devices are.
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
    ) -> None:
        """Take over the segments' Executables.

        Args:
            bound: the whole.
            placement: as it was planned.
            segments: of it, in parts where they may be moved.
            choice: among the devices of each.
            untimed: devices that queue work, of which no execution tells what it took.
            notes: sentences for `explain`.
        """
        self.bound, self.program = bound, bound.program
        self.placement = placement
        self.choice = choice
        self.segments = tuple(segments)
        self._leaves_something = bound.program.leaves_something
        self._untimed = untimed
        self._notes = tuple(notes)
        self._lock = threading.Lock()
        self._before: tuple[Ticket, ...] = ()  # the execution before, where it leaves something
        self._closed = False
        self._waiting: dict[Ticket, None] = {}  # submissions whose arguments are not known yet
        self._weights = self._weight_bases()
        self._checks = InputChecks(self.program, self._weights)
        values = self.program.values
        self._buffers = [
            [
                (values[at].shape, values[at].strides, find_dtype(values[at].dtype))
                for at in one.slice.outputs
            ]
            for one in self.segments
        ]
        self._made = {
            at: TensorView(at, 0, values[at].shape, values[at].strides, values[at].dtype)
            for one in self.segments
            for at in one.slice.outputs
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute, and return what the model returns."""
        _refuse_buffers(kwargs)
        if len(self.segments) == 1:
            return self._called(args, kwargs)
        queued = self._queued(args, kwargs, ())
        errors = [one._outcome() for one in queued.tickets]  # all have ended before any is raised
        if (error := _origin(errors)) is not None:
            raise error
        self._observe(queued.devices)
        return self._result(queued)

    def close(self) -> None:
        """Wait for what is under way, and free the segments; later executions fail.

        In a launch of its own it waits for nothing, and the segments are freed when it is closed
        again, or dropped.

        Raises:
            ExecutionError: a done-callback closes it: what it would wait for may be its own
                thread's work.
        """
        inside = [run for run in self._runs() if run._native.is_inside_launch]
        if not inside:
            refuse_in_callback()
            if not in_callable():
                for one in list(self._waiting):
                    one._outcome()
        self._closed = True
        for run in inside or self._runs():
            run.close()

    def _runs(self) -> Iterator[Executable]:
        return (run for one in self.segments for run in one.runs if run is not None)

    @property
    def closed(self) -> bool:
        """Whether it takes no more executions."""
        return self._closed

    def noted(self, notes: Sequence[str]) -> PlacedExecutable:
        """Itself, with other sentences for `explain`."""
        self._notes = tuple(notes)
        return self

    def explain(self) -> str:
        """Where each segment is and why, and what was measured."""
        lines = [self.placement.explain(), *self._notes]
        names = [one.name for one in self.placement.graph.processors]
        for at, one in enumerate(self.segments):
            after = one.costs.after
            others = [name for name, run in zip(names, one.runs, strict=True) if run is not None]
            others.remove(names[one.costs.planned])
            lines.append(
                f"segment {at} on {names[one.costs.planned]}: "
                f"{show_count(len(one.slice.bound.program.launches), 'launch', 'launches')}"
                + (f", behind {', '.join(map(str, after))}" if after else "")
                + (f", or on {', '.join(others)}" if others else "")
            )
        if self.choice.n_moved:
            paces = ", ".join(
                f"{name} {pace:.2f}" for name, pace in zip(names, self.choice.paces, strict=True)
            )
            lines.append(
                f"segments were moved {self.choice.n_moved} times; what they take over what was "
                f"expected: {paces}"
            )
        return "\n".join(lines)

    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, as `Executable.rebind_weights`.

        Raises:
            BindingError: a new storage does not fit.
        """
        with self._lock:
            for run in self._runs():
                run.rebind_weights()
            self._weights = self._weight_bases()
            self._checks = InputChecks(self.program, self._weights)

    def _weight_bases(self) -> dict[int, Base]:
        views = self.program.weight_views
        held = self.bound.bindings.weights
        return {value: _base_of(one[0], views[value][0]) for value, one in held.items()}

    def _submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        """Queue the segments; where executions leave something, tickets given are waited for."""
        _refuse_buffers(kwargs)
        if len(self.segments) == 1:
            return self._submitted_whole(args, kwargs, after)
        given = tickets_in(args, kwargs)
        whole = Ticket()
        whole._begin()  # segments may have, and what these write is not to be left half done
        if self._leaves_something:
            for one in given:
                one._outcome()
        if all(one.done() for one in given):
            self._queue_for(whole, args, kwargs, after)
        else:
            here = self._surroundings()
            self._waiting[whole] = None
            whole._call_when_done(lambda: self._waiting.pop(whole, None))
            when_ended(given, lambda: _ending(whole, self._queue_for, args, kwargs, after, here))
        return whole

    def _surroundings(self) -> _native.Surroundings | None:
        """The caller's state of torch, which all segments compare; None: there are none."""
        run = next(self._runs(), None)
        return None if run is None else run._surroundings()

    def _queue_for(
        self,
        whole: Ticket,
        args: Args,
        kwargs: Kwargs,
        after: Sequence[Ticket],
        surroundings: _native.Surroundings | None = None,
    ) -> None:
        """Queue the segments; the ticket ends when all of them have."""
        if any(whole._fail_as(one) for one in tickets_in(args, kwargs)):
            return
        args, kwargs = with_results(args, kwargs, Ticket.result)
        queued = self._queued(args, kwargs, after, surroundings)
        when_ended(queued.tickets, lambda: _ending(whole, self._end, queued))

    def _end(self, whole: Ticket, queued: Queued) -> None:
        error = _origin([one._outcome() for one in queued.tickets])
        if error is not None:
            whole._set_error(error)
            return
        self._observe(queued.devices)
        whole._set_result(self._result(queued))

    def _observe(self, devices: Sequence[int]) -> None:
        """What the latest executions of the segments took: where calls overlap those of others."""
        if self.choice.is_static:
            return
        took_ns = [
            None if device in self._untimed else one.run(device).last_execution.device_ns
            for one, device in zip(self.segments, devices, strict=True)
        ]
        with self._lock:
            self.choice.ended(devices, took_ns)

    def _called(self, args: Args, kwargs: Kwargs) -> Any:
        """Execute all as one segment on this thread.

        One that leaves something stays on the first device, which keeps the order.
        """
        if self.choice.is_static:
            return self._whole(self.segments[0].costs.planned)(*args, **kwargs)
        with self._lock:
            devices = self.choice.choose()
        result = self._whole(devices[0])(*args, **kwargs)
        self._observe(devices)
        return result

    def _whole(self, device: int) -> Executable:
        if self._closed:
            raise ExecutionError("the executable is closed")
        return self.segments[0].run(device)

    def _submitted_whole(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        if self.choice.is_static:
            planned = self.segments[0].costs.planned
            return self._whole(planned)._submitted(args, kwargs, after)
        with self._lock:
            devices = self.choice.choose()
            ticket = self._whole(devices[0])._submitted(args, kwargs, after)
        ticket._call_when_done(lambda: self._observe(devices))
        return ticket

    def _tensors(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """The tensors of a call, checked."""
        if self._closed:
            raise ExecutionError("the executable is closed")
        tensors = tensors_of_call(self.bound, args, kwargs)
        self._checks.check(tensors)
        return tensors

    def _queued(
        self,
        args: Args,
        kwargs: Kwargs,
        after: Sequence[Ticket],
        surroundings: _native.Surroundings | None = None,
    ) -> Queued:
        given = self._tensors(args, kwargs)
        held = {view.value: one for view, one in zip(self.program.inputs, given, strict=True)}
        with self._lock:
            devices = self.choice.choose()
            if self._leaves_something:
                after = (*after, *end_of(self._before))
            tickets = self._segments_queued(devices, held, after, surroundings)
            if self._leaves_something:
                self._before = tuple(tickets)
        return Queued(devices, tickets, given, held)

    def _segments_queued(
        self,
        devices: Sequence[int],
        held: dict[int, torch.Tensor],
        after: Sequence[Ticket],
        surroundings: _native.Surroundings | None,
    ) -> list[Ticket]:
        """Queue each segment on its device; `held` gets what crosses, by Value."""
        tickets: list[Ticket] = []
        for at, (one, device) in enumerate(zip(self.segments, devices, strict=True)):
            outputs = tuple(
                torch.empty_strided(shape, strides, dtype=dtype, device=self.program.device)
                for shape, strides, dtype in self._buffers[at]
            )
            held.update(zip(one.slice.outputs, outputs, strict=True))
            given = tuple(held[value] for value in one.slice.inputs)
            waits = (*(tickets[before] for before in one.costs.after), *after)
            try:
                run = one.run(device)
                tickets.append(run._submitted(given, {"out": outputs}, waits, surroundings))
            except BaseException:
                for other in reversed(tickets):
                    other.cancel()
                raise
        return tickets

    def _result(self, queued: Queued) -> Any:
        """What the model returns, around views of what lies in memory now."""
        results = []
        for one in self.program.results:
            view = one.view
            if one.input_leaf >= 0:
                results.append(queued.given[one.input_leaf])
            elif (held := queued.held.get(view.value)) is not None:
                results.append(held if view == self._made.get(view.value) else _view(held, view))
            else:
                results.append(tensor_at(*self._weights[view.value], view))
        return unflatten(self.bound.result_structure, results)

    def __enter__(self) -> PlacedExecutable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "an executable lies in its devices' memory, and cannot be copied or pickled: load the "
            "captured program once more"
        )


def _refuse_buffers(kwargs: Kwargs) -> None:
    for name in ("out", "feature_map"):
        if name in kwargs:
            raise BindingError(f"{name}: an executable on several devices takes none; leave it out")


def _ending(whole: Ticket, function: Callable[..., None], *args: Any) -> None:
    """Call a function for a ticket, which has its error."""
    try:
        function(whole, *args)
    except BaseException as error:
        whole._set_error(error)


def _origin(errors: Sequence[Exception | None]) -> Exception | None:
    """The first error that is no consequence of another one; None where nothing failed."""
    failed = [one for one in errors if one is not None]
    own = [one for one in failed if not isinstance(one, (DependencyError, CancelledError))]
    return next(iter((*own, *failed)), None)


def _view(held: torch.Tensor, view: TensorView) -> torch.Tensor:
    """A view of a Value that a tensor holds, whole."""
    return tensor_at(*_base_of(held), view)


def _base_of(tensor: torch.Tensor, view: TensorView | None = None) -> Base:
    """Where the Value begins of which a tensor is this view, or the whole."""
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage(), offset_bytes - (view.offset_bytes if view is not None else 0)
