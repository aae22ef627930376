"""Records launches: the observed arguments, results and writes of each operator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.console.progress import advance
from offload.console.user_code import user_location
from offload.distributed import Rendezvous
from offload.errors import CaptureError
from offload.interpreter.eager_run import flat
from offload.program import Role, TensorView, TritonKernel
from offload.record.collectives import NAMESPACES, Collectives
from offload.record.device_formats import refuse_write_in_own_format
from offload.record.drawn_before import DrawnBefore
from offload.record.fake_weights import FakeWeights
from offload.record.folding import note_constants
from offload.record.guards import refuse_write_beside_numpy
from offload.record.host_constants import check_made, refuse_write
from offload.record.kernel_modes import switched
from offload.record.launch_log import LaunchLog, indices_of
from offload.record.operators import (
    Overload,
    as_integers,
    check_plain,
    operator_of,
    shape_depends_on_data,
    shape_sources,
    tensors_in,
    written_arguments,
)
from offload.record.random_outcomes import RandomOutcome
from offload.record.seeding import seeding_unnoticed
from offload.record.storages import StorageTable, TrackedStorage

# A tensor argument of an operator, its storage, and whether the operator declares to write it.
Touched = tuple[torch.Tensor, TrackedStorage, bool]


class LaunchRecorder(LaunchLog):
    """Turns dispatched operators into Launches.

    Owner: one Recorder, on whose thread it is called.

    Attributes:
        collectives: those that were started, and their agreement with other ranks.
        sees_triton: the body of an operator made of Triton kernels is recorded, and not the
            operator.
        runs_originals: what torch.compile has wrapped runs as its original code.
    """

    sees_triton = runs_originals = False

    def __init__(
        self,
        table: StorageTable,
        *,
        guards_reads: bool,
        may_defer: Callable[[], bool] = lambda: False,
        fakes: FakeWeights | None = None,
        drawn: DrawnBefore | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        super().__init__(
            table, guards_reads=guards_reads, may_defer=may_defer, fakes=fakes, drawn=drawn
        )
        self.collectives = Collectives(self, rendezvous)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator below the modes and record it."""
        with seeding_unnoticed():
            if func.namespace in NAMESPACES:
                return self.collectives.dispatch(func, args, kwargs)
            return self.launch(func, args, kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the recording."""
        return self.table.device

    def launch_directly(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As `dispatch`, called above the modes, for an operator that need not be a single kernel.

        torch's own function would decompose the operator, or ask sizes for numbers, so it is not
        called. Gradients are not recorded.
        """
        with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
            self._is_composite = True
            try:
                return self.dispatch(func, args, dict(kwargs or {}))
            finally:
                self._is_composite = False

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `dispatch`, for an operator that is recorded as it is."""
        operator = operator_of(func)
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        call = func
        if self._fakes is not None:
            args, kwargs, context = self._fakes.launch(operator, args, kwargs)
            call = self._fakes.rule(func)
        if func.namespace in NAMESPACES:
            call = self.collectives.calling(operator.name, call)
        arguments = operator.in_order(args, kwargs)
        touched: list[Touched] = []
        with self._let_pass_once_deferred(), self._deciding():
            touched = self._before_launch(operator, arguments)
        if self.collectives.under_way:
            self.collectives.settle_writes(operator.name, touched)
        if self._drawn is not None and self._drawn.is_next(operator, arguments):
            outcome = self._drawn.give(func, [self.described(one) for one in arguments], touched)
            self._after_launch(operator, arguments, touched, outcome, drew=True)
            return outcome
        may_draw = self._fakes is None and (operator.random or not operator.is_aten)
        if may_draw:
            self.generators.check_unseeded()
        with context:
            outcome = call(*args, **kwargs)
        # Not all operators of other libraries declare that they draw.
        drew = may_draw and self.generators.note_drawn() and not operator.is_aten
        with self._let_pass_once_deferred(), self._deciding():
            self._after_launch(operator, arguments, touched, outcome, drew)
        advance()
        return outcome

    def _before_launch(self, operator: Overload, arguments: list[Any]) -> list[Touched]:
        """Find the storages of the operator's arguments; keep what it will write."""
        touched = []
        name = operator.name
        for is_write, argument in zip(
            written_arguments(operator, arguments), arguments, strict=True
        ):
            if type(argument) is torch.Generator:
                self.generators.check(argument, name)
            for tensor in tensors_in(argument):
                held_as = self.table.state.unwatched_name(tensor)
                check_plain(tensor, f"{name} on the model's {held_as!r}" if held_as else name)
                tracked = self.track(tensor, name)
                if is_write:
                    self._before_write(name, tracked)
                touched.append((tensor, tracked, is_write))
        if shape_depends_on_data(operator, arguments):
            sources = [self.track(tensor, name) for tensor in shape_sources(name, arguments)]
            if not all(tracked.known for tracked in sources):
                self.guards.require(name, "its result's shape depends on the data")
        return touched

    def launch_kernel(
        self,
        kernel: TritonKernel,
        arguments: tuple[Any, ...],
        written: Set[int],
        launch: Callable[[], object],
    ) -> None:
        """Run a Triton kernel below the modes and record it.

        Args:
            kernel: what is launched.
            arguments: its parameters' tensors and numbers.
            written: the positions of those through which it writes.
            launch: launches it; not called where nothing is computed.
        """
        operator = Overload(
            kernel.name,
            (),
            tuple(position in written for position in range(len(arguments))),
            returns=False,
            reserves=False,
            random=False,
            reads_host=False,
            moves_metadata=False,
            dynamic_shape=False,
            is_aten=False,
        )
        given = list(arguments)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            touched: list[Touched] = []
            with self._let_pass_once_deferred(), self._deciding():
                touched = self._before_launch(operator, given)
            if self.collectives.under_way:
                self.collectives.settle_writes(operator.name, touched)
            if self._fakes is None:
                launch()
            n_launches = len(self.launches)
            with self._let_pass_once_deferred(), self._deciding():
                self._after_launch(operator, given, touched, None, drew=False)
        if len(self.launches) > n_launches:
            self.launches[-1] = dataclasses.replace(self.launches[-1], callee=kernel)
        advance()

    def _before_write(self, name: str, tracked: TrackedStorage) -> None:
        refuse_write(name, tracked, self.table.device)
        if tracked.is_state:
            refuse_write_in_own_format(name, tracked.value)
        refuse_write_beside_numpy(name, tracked)
        tracked.keep_before()

    def recorded_copy(self, to: torch.Tensor, made: torch.Tensor) -> None:
        """Record a launch that copies a tensor made by the call to a held tensor."""
        self.dispatch(torch.ops.aten.copy_.default, (to, made), {})

    def _after_launch(
        self,
        operator: Overload,
        arguments: list[Any],
        touched: list[Touched],
        outcome: Any,
        drew: bool,
    ) -> None:
        if operator.moves_metadata:
            self._follow_metadata(operator, touched)
            return
        writes = self._observed_writes(operator, touched)
        outcomes = flat(outcome) if operator.returns else []
        made, results = self._track_results(operator, outcomes)
        given = [tracked for _, tracked, _ in touched]
        is_foldable = note_constants(operator, given, writes, made)
        check_made(operator, made, self.table.device)
        returns_tensor = any(isinstance(one, torch.Tensor) for one in outcomes)
        reads_host = operator.reads_host and not returns_tensor
        if reads_host and operator.is_aten and all(tracked.known for _, tracked, _ in touched):
            return  # the value can never differ
        if reads_host:
            self.guards.note_read(operator.name, outcomes)
        elif operator.reserves or (operator.returns and not (made or writes)):
            return  # it reserves memory, makes views, or answers from shapes alone
        elif operator.is_aten and not made and _all_on_host(touched):
            return  # a check whose outcome can never differ
        if is_foldable:
            self.foldable.add(len(self.launches))
        is_random = operator.draws(arguments)
        if is_random or drew:
            self._note_random(touched, writes, results, outcomes)
        if is_random or any(one.is_state for one in writes):
            self.guards.note_change()
        name, kept = operator.name, tuple[torch.Tensor, ...]()
        if self.numbers is not None:
            name, arguments, kept = self.numbers.instead(name, arguments)
        if self.modes is not None and (change := self.modes.change()):
            self.note_unseen(switched(user_location(), operator.name, change))
        self._append(
            name,
            tuple(self.described(argument) for argument in arguments),
            results=tuple(results),
            reads=indices_of([*given, *map(self.table.of, kept)]),
            writes=indices_of((*writes, *made)),
            random=is_random or drew,
            guard=outcomes[0] if reads_host else None,
            guards_shape=shape_depends_on_data(operator, arguments),
        )

    def _note_random(
        self,
        touched: list[Touched],
        writes: list[TrackedStorage],
        results: list[TensorView | None],
        outcomes: list[Any],
    ) -> None:
        """Keep what a launch has drawn, where it was computed."""
        self.generators.refuse_forked()
        if self._fakes is None:
            of_new = zip(results, outcomes, strict=bool(results))
            new = [tensor for view, tensor in of_new if view is not None]
            self.outcomes.append(RandomOutcome.observed(new, touched, writes))

    def _follow_metadata(self, operator: Overload, touched: list[Touched]) -> None:
        """Follow resize_, set_, transpose_ and the like: the tensor may lie elsewhere now."""
        for tensor, tracked, _ in touched:
            current = self.table.find(tensor)
            if current is None:
                made = self.table.add_made(tensor, "storage", unwritten=True)
                check_made(operator, [made], self.table.device)
            elif (
                current is tracked and tensor.untyped_storage().nbytes() != tracked.nbytes_at_birth
            ):
                self._grown(tensor, tracked)

    def _observed_writes(self, operator: Overload, touched: list[Touched]) -> list[TrackedStorage]:
        writes = []
        for tensor, tracked, is_write in touched:
            if self._fakes is None and tensor.untyped_storage()._cdata != tracked.storage._cdata:
                raise CaptureError(
                    f"{user_location()}: {operator.name} gave {tracked.value.name} another storage "
                    "in place, which a replay would not find: use the operator that returns a new "
                    "tensor"
                )
            current = tracked
            if tensor.untyped_storage().nbytes() != tracked.nbytes_at_birth:
                current = self._grown(tensor, tracked)
            changed = current.watch is not None and current.watch.changed()
            if is_write or changed:
                refuse_write(operator.name, current, self.table.device)
                if current.is_state:
                    refuse_write_in_own_format(operator.name, current.value)
                current.written = True
                writes.append(current)
        return writes

    def _grown(self, tensor: torch.Tensor, tracked: TrackedStorage) -> TrackedStorage:
        if tracked.value.role is not Role.ACTIVATION or tracked.value.size_bytes:
            raise CaptureError(
                f"{user_location()}: {tracked.value.name} was resized in place from "
                f"{tracked.value.size_bytes} to {tensor.untyped_storage().nbytes()} bytes: "
                "allocate it at its final size"
            )
        return self.table.replace_grown(tracked, tensor)

    def _track_results(
        self, operator: Overload, outcomes: list[Any]
    ) -> tuple[list[TrackedStorage], list[TensorView | None]]:
        """The storages that an operator made, and for each result its view of a new storage."""
        made: list[TrackedStorage] = []
        results: list[TensorView | None] = []
        for outcome in outcomes:
            view = None
            if isinstance(outcome, torch.Tensor):
                check_plain(outcome, operator.name)
                is_new = self.table.find(outcome) is None
                if is_new and not self._unused.set_aside(
                    operator.name, outcome, outcomes, self.table.device
                ):
                    short_name = operator.name.removeprefix("aten::").partition(".")[0]
                    label = f"{short_name}_{len(self.launches)}"
                    made.append(self.table.add_made(outcome, label, unwritten=operator.reserves))
                    view = self.table.view(outcome, made[-1])
            results.append(view)
        return made, results

    def guard_content(self, tensor: torch.Tensor, what: str) -> None:
        """Record that every execution must find these bytes in `tensor` (guard mode only).

        Raises:
            CaptureError: reads are to be avoided, or state has changed already.
        """
        with self._let_pass_once_deferred(), _disable_current_modes():
            self._guard_content(tensor, what)

    def _guard_content(self, tensor: torch.Tensor, what: str) -> None:
        tracked = self.track(tensor, what)
        if tracked.known:
            return
        self.guards.require(what, "it reads a tensor's values on the host")
        self.guards.note(what)
        bits = as_integers(tensor)
        expected = self.table.add_weight(bits.clone())
        views = (
            self.table.view(bits, tracked),
            self.table.view(expected.holders[0], expected),
        )
        if what in ("torch.numpy", "torch.__array__"):
            tracked.exposed_at = user_location()
        self.guard_equal(views, (tracked, expected))


def _all_on_host(touched: list[Touched]) -> bool:
    return bool(touched) and all(tracked.value.on_host for _, tracked, _ in touched)
