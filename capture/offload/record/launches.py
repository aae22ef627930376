"""Records launches: what each operator is given, makes and writes, as observed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from offload.console.progress import advance
from offload.console.user_code import user_location
from offload.distributed import Rendezvous
from offload.errors import CaptureError, OffloadError
from offload.interpreter.eager_run import flat
from offload.program import Argument, Launch, Operator, Role, Symbol, TensorView
from offload.record.collectives import NAMESPACES, Collectives
from offload.record.device_formats import refuse_write_in_own_format
from offload.record.drawn_before import DrawnBefore
from offload.record.fake_launches import FakeLaunches
from offload.record.fake_weights import FakeWeights
from offload.record.folding import note_constants
from offload.record.guards import HostReadGuards, refuse_write_beside_numpy
from offload.record.host_constants import check_made, refuse_write
from offload.record.kept_numbers import KeptNumbers
from offload.record.modes import seeding_unnoticed
from offload.record.operators import (
    Overload,
    argument_data,
    as_integers,
    check_plain,
    operator_of,
    shape_depends_on_data,
    shape_sources,
    tensors_in,
    written_arguments,
)
from offload.record.random_outcomes import RandomOutcome
from offload.record.recording_device import Allocations
from offload.record.storages import StorageTable, TrackedStorage
from offload.record.unused_results import UnusedResults
from offload.record.used_generators import UsedGenerators

# A tensor that an operator is given, its storage, and whether the operator declares to write it.
Touched = tuple[torch.Tensor, TrackedStorage, bool]


class LaunchRecorder:
    """Turns dispatched operators into Launches over the Values of a StorageTable.

    Owner: one Recorder, on whose thread it is called.

    Attributes:
        table: the storages met so far.
        launches: the launches so far.
        foldable: by index those that always make the same, and are given what is known alone.
        outcomes: of the random ones, in order; none where nothing is computed.
        guards: what is guarded, or may not be.
        generators: those that random operators drew from, with their state before the call.
        refusal: the first thing that was refused; the call may have swallowed the error.
        running: the torch function that is being called, as the function mode sees it.
        allocations: tells tensors made during the call from those made before; set at the begin.
        allows_unseen: work that cannot be seen is noted rather than refused: the device can run
            the call as one opaque launch; set at the begin.
        unseen: the first such work; empty if there was none.
        numbers: those that launches are given as tensors; None: they are given as numbers.
        collectives: those that were started, and what other ranks are told of them.
    """

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
        self.table = table
        self.launches: list[Launch] = []
        self.foldable: set[int] = set()
        self.outcomes: list[RandomOutcome] = []
        self.guards = HostReadGuards(allowed=guards_reads, may_defer=may_defer)
        self.generators = UsedGenerators()
        self._ranges: list[str] = []
        self.allocations = Allocations(torch.device("cpu"))
        self.refusal: OffloadError | None = None
        self.running = ""
        self.allows_unseen = False
        self.unseen = ""
        self.numbers: KeptNumbers | None = None
        self._fakes = None if fakes is None else FakeLaunches(fakes, table, self)
        self._deciding = contextlib.nullcontext if fakes is None else fakes.deciding
        self._drawn = drawn
        self._unused = UnusedResults()
        self.collectives = Collectives(self, rendezvous)

    def note_refusal(self, refusal: OffloadError) -> None:
        """Keep what is refused, if it is the first."""
        self.refusal = self.refusal or refusal

    def take_refusal(self) -> OffloadError | None:
        """What was refused first, which is not kept: its traceback leads here, as a cycle."""
        refusal, self.refusal = self.refusal, None
        return refusal

    def raise_refusal(self) -> None:
        """Raise what was refused first, if anything was."""
        refusal = self.take_refusal()
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator below the modes and record it."""
        with seeding_unnoticed():
            if func.namespace in NAMESPACES:
                return self.collectives.dispatch(func, args, kwargs)
            return self.launch(func, args, kwargs)

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, where the operator is what is to be recorded."""
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
        if self._drawn is not None and self._drawn.is_next(operator, arguments):
            outcome = self._drawn.give(func, [self.described(one) for one in arguments], touched)
            self._after_launch(operator, arguments, touched, outcome, drew=True)
            return outcome
        may_draw = self._fakes is None and (operator.random or not operator.is_aten)
        if may_draw:
            self.generators.check_unseeded()
        with context:
            outcome = call(*args, **kwargs)
        # Of others' operators not all say that they draw.
        drew = may_draw and self.generators.note_drawn() and not operator.is_aten
        with self._let_pass_once_deferred(), self._deciding():
            self._after_launch(operator, arguments, touched, outcome, drew)
        advance()
        return outcome

    @contextlib.contextmanager
    def _let_pass_once_deferred(self) -> Iterator[None]:
        """Refuse nothing of a call that is not recorded any more."""
        try:
            yield
        except OffloadError:
            if self.guards.deferred is None:
                raise

    def _before_launch(self, operator: Overload, arguments: list[Any]) -> list[Touched]:
        """Find the storages that the operator is given; keep what it is going to write."""
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

    def _before_write(self, name: str, tracked: TrackedStorage) -> None:
        refuse_write(name, tracked, self.table.device)
        if tracked.is_state:
            refuse_write_in_own_format(name, tracked.value)
        refuse_write_beside_numpy(name, tracked)
        tracked.keep_before()

    def track(self, tensor: torch.Tensor, name: str) -> TrackedStorage:
        """The storage of a tensor that `name` uses; one not met before is a weight.

        Raises:
            CaptureError: it was made during the call, by work that the recorder cannot see; or it
                is a result on the CPU that a launch of another device gave beside its own.
        """
        tracked = self.table.find(tensor)
        if tracked is not None:
            return tracked
        self._unused.check(tensor)
        identity = tensor.untyped_storage()._cdata
        unseen = (
            tensor.numel() > 0
            and not self.table.state.knows(identity)
            and name != "aten::lift_fresh"
            and self._made_during_call(tensor)
        )
        if unseen:
            self.note_unseen(
                CaptureError(
                    f"{user_location()}: {name} uses a tensor of shape {list(tensor.shape)} that "
                    "was made during the call by work that the recorder cannot see (another "
                    "thread, or an extension that bypasses torch's dispatcher): move that work to "
                    "the calling thread, or before the capture"
                )
            )
            return self.table.add_made(tensor, name, unwritten=False)
        if name == "aten::lift_fresh" and self._made_during_call(tensor):
            if not self.running:  # inside a torch function the data was looked at, or is torch's
                raise CaptureError(
                    f"{user_location()}: a tensor was made from data by a legacy constructor "
                    "(torch.Tensor, torch.FloatTensor, ...), whose data the recorder cannot see: "
                    "use torch.tensor"
                )
            return self._track_literal(tensor)
        tracked = self.table.add_weight(tensor)
        tracked.foreign = name == "aten::lift_fresh" and not self.table.state.knows(identity)
        return tracked

    def note_unseen(self, refusal: CaptureError) -> None:
        """Note work that cannot be seen.

        Raises:
            CaptureError: the refusal, on a device that runs no opaque launches.
        """
        if not self.allows_unseen:
            raise refusal
        self.unseen = self.unseen or str(refusal)

    def hand_out(self, tensor: torch.Tensor, refusal: CaptureError) -> None:
        """Note that memory is given to code that cannot be followed, and may write it.

        Raises:
            CaptureError: as `note_unseen`.
        """
        with self._let_pass_once_deferred(), _disable_current_modes():
            self.note_unseen(refusal)
            self.track(tensor, "what its address is given to").keep_before()

    def refuse_read(self, what: str, refusal: CaptureError) -> None:
        """Refuse a read that cannot become a guard, or let it pass.

        Raises:
            CaptureError: the refusal.
        """
        self.guards.refuse(what, refusal)

    def _track_literal(self, tensor: torch.Tensor) -> TrackedStorage:
        """A tensor that the forward made from Python numbers: a fresh copy at each execution.

        (Unless nobody writes it: then it is folded like any other constant. A host constant must
        not be written.)
        """
        if tensor.device != self.table.device:
            return self.table.add_weight(tensor)
        source = self.table.add_weight(tensor.clone())
        made = self.table.add_made(tensor, "literal", unwritten=False)
        source.known = made.known = True
        self.foldable.add(len(self.launches))
        view = self.table.view(tensor, made)
        self._append(
            "aten::clone",
            (dataclasses.replace(view, value=source.value.index), None),
            results=(view,),
            reads=_indices((source,)),
            writes=_indices((made,)),
        )
        return made

    def recorded_copy(self, to: torch.Tensor, made: torch.Tensor) -> None:
        """Copy what the call made to a tensor that is held, by a launch."""
        self.dispatch(torch.ops.aten.copy_.default, (to, made), {})

    def guard_same(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Record that every execution must find the same number in all of these.

        Args:
            tensors: of no dimensions and one dtype.
            what: they are, for the message of an execution that finds something else.
        """
        stacked = self.dispatch(torch.ops.aten.stack.default, (list(tensors),), {})
        tracked = self.table.of(stacked)
        first = stacked[:1].expand_as(stacked)
        self._append(
            "aten::equal",
            (self.table.view(stacked, tracked), self.table.view(first, tracked)),
            results=(None,),
            reads=_indices((tracked,)),
            writes=(),
            guard=True,
        )
        self.launches[-1] = dataclasses.replace(self.launches[-1], source=what)

    def added_to(self, tensor: torch.Tensor) -> tuple[object, ...] | None:
        """What the call has added to a tensor so far, to be compared; None: it wrote otherwise."""
        index = self.table.of(tensor).value.index
        added: list[object] = []
        for launch in self.launches:
            if index not in launch.writes:
                continue
            _, *others = launch.arguments
            if launch.name == "aten::add_.Tensor" and all(map(self._is_fixed, others)):
                added.append(tuple(others))
            elif launch.name.startswith("aten::_foreach_add_."):
                added.append(launch.index)  # the same to each of its list
            else:
                return None
        return tuple(added)

    def _is_fixed(self, argument: Argument) -> bool:
        """Whether it is the same number in each execution."""
        if not isinstance(argument, TensorView):
            return True
        return self.numbers is not None and self.numbers.has(argument.value)

    def _made_during_call(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return True
        return self.allocations.contains(tensor.untyped_storage())

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
            return  # the value can never be another
        if reads_host:
            self.guards.note_read(operator.name, outcomes)
        elif operator.reserves or (operator.returns and not (made or writes)):
            return  # it reserves memory, makes views, or answers from shapes alone
        elif operator.is_aten and not made and _all_on_host(touched):
            return  # a check that can never come out otherwise
        if is_foldable:
            self.foldable.add(len(self.launches))
        is_random = operator.draws(arguments)
        if is_random or drew:
            self.generators.refuse_forked()
        if is_random or any(one.is_state for one in writes):
            self.guards.note_change()
        if (is_random or drew) and self._fakes is None:
            of_new = zip(results, outcomes, strict=bool(results))
            new = [tensor for view, tensor in of_new if view is not None]
            self.outcomes.append(RandomOutcome.observed(new, touched, writes))
        name, kept = operator.name, tuple[torch.Tensor, ...]()
        if self.numbers is not None:
            name, arguments, kept = self.numbers.instead(name, arguments)
        self._append(
            name,
            tuple(self.described(argument) for argument in arguments),
            results=tuple(results),
            reads=_indices([*given, *map(self.table.of, kept)]),
            writes=_indices((*writes, *made)),
            random=is_random or drew,
            guard=outcomes[0] if reads_host else None,
            guards_shape=shape_depends_on_data(operator, arguments),
        )

    def _append(
        self,
        operator: str,
        arguments: tuple[Argument, ...],
        *,
        results: tuple[TensorView | None, ...],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        random: bool = False,
        guard: bool | int | float | complex | None = None,
        guards_shape: bool = False,
    ) -> None:
        index, source = len(self.launches), user_location()
        observed = (results, reads, writes, random, guard, guards_shape)
        self.launches.append(
            Launch(index, Operator(operator), arguments, *observed, source, tuple(self._ranges))
        )

    def note_range(self, func: Any, args: tuple[Any, ...]) -> None:
        """Follow the ranges of the profiler that the call opens; it may end some of its caller's.

        `func` is one of torch's operators that record_function calls, whose first argument is the
        name where it begins one (torch/csrc/autograd/record_function_ops.cpp).
        """
        if func._schema.name.startswith("profiler::_record_function_enter"):
            self._ranges.append(str(args[0]))
        elif self._ranges:
            self._ranges.pop()

    def _follow_metadata(self, operator: Overload, touched: list[Touched]) -> None:
        """After resize_, set_, transpose_ and the like: the tensor may lie elsewhere now."""
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
        """The storages that an operator made, and for each of its results the view of a new one."""
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
        self._append(
            "aten::equal",
            views,
            results=(None,),
            reads=_indices((tracked, expected)),
            writes=(),
            guard=True,
        )

    def described(self, argument: Any) -> Argument:
        """An argument whose tensors are known, as a Program holds it."""
        if isinstance(argument, torch.Tensor):
            tracked = self.table.find(argument)
            assert tracked is not None
            return self.table.view(argument, tracked)
        if isinstance(argument, (list, tuple)):
            return tuple(self.described(item) for item in argument)
        if type(argument) is torch.Generator:
            return Symbol("generator", str(self.generators.note(argument)))
        return argument_data(argument)


def _all_on_host(touched: list[Touched]) -> bool:
    return bool(touched) and all(tracked.value.on_host for _, tracked, _ in touched)


def _indices(tracked: Iterable[TrackedStorage]) -> tuple[int, ...]:
    return tuple(sorted({one.value.index for one in tracked}))
