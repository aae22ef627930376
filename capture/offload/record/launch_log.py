"""The launches of a call so far, with the storages that they use and the refusals."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from offload.console.user_code import user_location
from offload.errors import CaptureError, OffloadError
from offload.program import (
    Argument,
    Launch,
    Operator,
    Symbol,
    TensorView,
    TritonCode,
    TritonKernel,
)
from offload.record.drawn_before import DrawnBefore
from offload.record.fake_launches import FakeLaunches
from offload.record.fake_weights import FakeWeights
from offload.record.guards import HostReadGuards
from offload.record.kept_numbers import KeptNumbers
from offload.record.kernel_modes import KernelModes
from offload.record.operators import (
    argument_data,
)
from offload.record.random_outcomes import RandomOutcome
from offload.record.recording_device import Allocations
from offload.record.storages import StorageTable, TrackedStorage
from offload.record.unused_results import UnusedResults
from offload.record.used_generators import UsedGenerators


class LaunchLog:
    """The recording of a call so far: Launches over the Values of a StorageTable.

    Owner: one Recorder, on whose thread it is called.

    Attributes:
        table: the storages met so far.
        launches: the launches so far.
        foldable: indices of launches that always give the same results, from known arguments alone.
        outcomes: of the random launches, in order; empty where nothing is computed.
        guards: the reads that are guarded, or must not be.
        generators: the generators of random operators, with their state before the call.
        refusal: the first refusal; the call may have swallowed the error.
        running: the torch function that is being called, as the function mode sees it.
        allocations: distinguishes tensors made during the call from earlier ones; set at `begin`.
        allows_unseen: unobservable work is noted rather than refused, as the device can run the
            call as one opaque launch; set at `begin`.
        unseen: the first such work; empty if there is no such work.
        numbers: the numbers passed to launches as tensors; None: all are passed as numbers.
        modes: torch's when the call began; set at `begin`.
        triton: the Triton kernels that were launched.
        notes: what is to be known of the recording, for the user.
    """

    def __init__(
        self,
        table: StorageTable,
        *,
        guards_reads: bool,
        may_defer: Callable[[], bool] = lambda: False,
        fakes: FakeWeights | None = None,
        drawn: DrawnBefore | None = None,
    ) -> None:
        self.table = table
        self.launches: list[Launch] = []
        self.foldable: set[int] = set()
        self.outcomes: list[RandomOutcome] = []
        self.guards = HostReadGuards(allowed=guards_reads, may_defer=may_defer)
        self.generators = UsedGenerators()
        self._ranges: list[str] = []
        self._passes: dict[int, int] = {}  # numbers of backward passes, by autograd's identifiers
        self.allocations = Allocations(torch.device("cpu"))
        self.refusal: OffloadError | None = None
        self.running = ""
        self.allows_unseen = False
        self.unseen = ""
        self.numbers: KeptNumbers | None = None
        self.modes: KernelModes | None = None
        self.notes: list[str] = []
        self.triton: dict[TritonKernel, TritonCode] = {}
        self._fakes = None if fakes is None else FakeLaunches(fakes, table, self)
        self._deciding = contextlib.nullcontext if fakes is None else fakes.deciding
        self._drawn = drawn
        self._unused = UnusedResults()
        self._is_composite = False  # of the current launch

    def note_refusal(self, refusal: OffloadError) -> None:
        """Keep a refusal if it is the first."""
        self.refusal = self.refusal or refusal

    def take_refusal(self) -> OffloadError | None:
        """Take the first refusal. It is not kept: its traceback would form a reference cycle."""
        refusal, self.refusal = self.refusal, None
        return refusal

    def raise_refusal(self) -> None:
        """Raise the first refusal, if any."""
        refusal = self.take_refusal()
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal

    @contextlib.contextmanager
    def _let_pass_once_deferred(self) -> Iterator[None]:
        """Refuse nothing in a call that is no longer recorded."""
        try:
            yield
        except OffloadError:
            if self.guards.deferred is None:
                raise

    def track(self, tensor: torch.Tensor, name: str) -> TrackedStorage:
        """The storage of a tensor that `name` uses; a storage not met before is a weight.

        Raises:
            CaptureError: the tensor was made during the call by work that the recorder cannot see;
                or it is a CPU result that a launch of another device gave beside its own.
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
            if not self.running:  # inside a torch function the data was inspected, or is torch's
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
        """Note unobservable work.

        Raises:
            CaptureError: the refusal, on a device that runs no opaque launches.
        """
        if not self.allows_unseen:
            raise refusal
        self.unseen = self.unseen or str(refusal)

    def hand_out(self, tensor: torch.Tensor, refusal: CaptureError) -> None:
        """Note that memory is passed to code that cannot be followed and may write it.

        Raises:
            CaptureError: as `note_unseen`.
        """
        with self._let_pass_once_deferred(), _disable_current_modes():
            self.note_unseen(refusal)
            self.track(tensor, "the code that receives its address").keep_before()

    def refuse_read(self, what: str, refusal: CaptureError) -> None:
        """Refuse a read that cannot become a guard, or let it pass.

        Raises:
            CaptureError: the refusal.
        """
        self.guards.refuse(what, refusal)

    def _track_literal(self, tensor: torch.Tensor) -> TrackedStorage:
        """Track a tensor that the forward made from Python numbers: a fresh copy at each execution.

        (If nothing writes it, it is folded like any other constant. A host constant must not be
        written.)
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
            reads=indices_of((source,)),
            writes=indices_of((made,)),
        )
        return made

    def _made_during_call(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return True
        return self.allocations.contains(tensor.untyped_storage())

    def guard_equal(
        self,
        views: tuple[TensorView, TensorView],
        storages: Iterable[TrackedStorage],
        what: str = "",
    ) -> None:
        """Record that every execution must find the same content in two views.

        Args:
            views: of equal shape and dtype.
            storages: those that they show.
            what: their description, for the message of an execution that finds other content; the
                user's line where it is empty.
        """
        self._append(
            "aten::equal",
            views,
            results=(None,),
            reads=indices_of(storages),
            writes=(),
            guard=True,
        )
        if what:
            self.launches[-1] = dataclasses.replace(self.launches[-1], source=what)

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
        where = (source, tuple(self._ranges), self._backward_pass())
        self.launches.append(Launch(index, Operator(operator), arguments, *observed, *where))

    def _backward_pass(self) -> int | None:
        """The number of the backward pass that runs on this thread; None: none runs."""
        identifier = torch._C._current_graph_task_id()
        if identifier < 0:
            return None
        return self._passes.setdefault(identifier, len(self._passes))

    def note_range(self, func: Any, args: tuple[Any, ...]) -> None:
        """Follow the profiler ranges that the call opens; it may end some of its caller's.

        `func` is one of torch's operators that record_function calls, whose first argument is the
        name where it begins a range (torch/csrc/autograd/record_function_ops.cpp).
        """
        if func._schema.name.startswith("profiler::_record_function_enter"):
            self._ranges.append(str(args[0]))
        elif self._ranges:
            self._ranges.pop()

    def described(self, argument: Any) -> Argument:
        """An argument with tracked tensors, as a Program holds it."""
        if isinstance(argument, torch.Tensor):
            tracked = self.table.find(argument)
            assert tracked is not None
            view = self.table.view(argument, tracked)
            if self._is_composite and argument.requires_grad and not argument.is_inference():
                return dataclasses.replace(view, requires_grad=True)
            return view
        if isinstance(argument, (list, tuple)):
            return tuple(self.described(item) for item in argument)
        if type(argument) is torch.Generator:
            return Symbol("generator", str(self.generators.note(argument)))
        return argument_data(argument)


def indices_of(tracked: Iterable[TrackedStorage]) -> tuple[int, ...]:
    """The Values of storages, in order, each once."""
    return tuple(sorted({one.value.index for one in tracked}))
