"""The Recorder: watches one call through torch's dispatch and function modes."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from offload.distributed import Rendezvous
from offload.errors import CaptureError, OffloadError
from offload.interpreter.own_generators import default_generator
from offload.program import Overlap
from offload.program.structure import (
    OpaqueStructure,
    Structure,
    constants,
    flatten,
    unflatten,
)
from offload.record.call_arguments import CallArguments
from offload.record.call_state import reachable_state, unseen_changes
from offload.record.callables import (
    Parameters,
    compiled_parts,
    refuse_compiled,
    refuse_nested_captures,
)
from offload.record.device_formats import refuse_own_format
from offload.record.drawn_before import DrawnBefore
from offload.record.fake_weights import FakeWeights
from offload.record.host_constants import check_undrawn, may_be_host_constant
from offload.record.input_overlaps import common_memory, written_overlaps
from offload.record.input_samples import input_samples
from offload.record.kept_numbers import KeptNumbers
from offload.record.launches import LaunchRecorder
from offload.record.model_state import ModelState, changed_unseen_error
from offload.record.modes import (
    FunctionMode,
    dispatch_mode,
    executions_refused,
    seeding_noticed,
    seeding_refused,
)
from offload.record.operators import is_tensor
from offload.record.parallel_wrappers import refuse_parallel_wrappers
from offload.record.plain_call import PlainCall, plain_call
from offload.record.python_random import PythonRandom
from offload.record.recording import Recording, recording_of
from offload.record.recording_device import Allocations, recording_device, refuse_capturing
from offload.record.repeatable_call import RepeatableCall, Surroundings, called_again
from offload.record.results import GivenTensors, handed_out, result_of
from offload.record.storages import StorageTable, alias
from offload.record.surroundings import (
    LeafGradients,
    caller_of,
    not_training,
    refuse_gradients,
    root_module,
)
from offload.record.thread_lookups import CompilingAnswers, eager_paths_taken
from offload.record.trained_state import TrainedState
from offload.record.whole_program import ObservedCall, WholeProgram


class Recorder:
    """Records exactly one call, between `begin` and `finish` (or `abandon`).

    Owner: one with-block. Thread: the one that calls the model; other threads' work is not seen,
    and what depends on it is refused, or on a device that runs opaque launches makes the call one.

    Attributes:
        rendezvous: where the ranks that record the call as well meet; None: there are none.
    """

    def __init__(
        self,
        *,
        host_reads: str,
        function: Callable[..., Any],
        parameters: Parameters,
        runs_opaque: Callable[[str], bool] = lambda _: False,
        fakes: FakeWeights | None = None,
        plain: PlainCall | None = None,
        read_untold: str = "",
        keeps_seen: bool = False,
        trains: bool = False,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Look at what is going to be called.

        Args:
            host_reads: as `capture` takes it.
            function: what will be called.
            parameters: its parameters' names.
            runs_opaque: whether a device of this type can run the call as one opaque launch.
            fakes: record under fake tensors; nothing is executed, and the result has no content.
            plain: the call has been made like any other, and read a tensor on the host. Now it is
                told that it is being compiled, and must do the same.
            read_untold: the same under fake tensors, where nothing can be read or compared.
            keeps_seen: the Recording keeps all that was seen.
            trains: the call may record gradients and step optimizers.
            rendezvous: where the ranks that record the call as well meet; None: there are none.
        """
        self.rendezvous = rendezvous
        self._keeps_seen = keeps_seen
        self._returned: tuple[list[torch.Tensor], Structure] | None = None
        with torch.no_grad():
            self.table = StorageTable(ModelState(function, trains=trains))
        self._avoids_reads = host_reads == "avoid"
        self._fakes = fakes
        self._read_untold = read_untold if plain is None else plain.read
        self._answers = CompilingAnswers(told=bool(self._read_untold))
        self._plain = plain
        may_defer = self._avoids_reads and fakes is None
        self._log = LaunchRecorder(
            self.table,
            guards_reads=not self._avoids_reads,
            may_defer=self._answers.may_matter if may_defer else lambda: False,
            fakes=fakes,
            drawn=None if plain is None else plain.drawn,
            rendezvous=rendezvous,
        )
        self._function = function
        self._parameters = parameters
        self._runs_opaque = runs_opaque
        self._compiled: tuple[str, ...] = ()
        self._context = contextlib.ExitStack()
        self._seeding = contextlib.ExitStack()  # noticed until generators were looked at
        self._inputs: list[torch.Tensor] = []
        self._samples: tuple[bytes, ...] = ()
        self._arguments = CallArguments((), {})
        self._call: tuple[Any, Any] = ((), {})
        self._host_state: torch.Tensor | None = None
        self._python_random = PythonRandom()

    # ---- the call ----------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Start recording a call with these arguments.

        Returns:
            The arguments to call with: aliases of the tensors, nested alike.

        Raises:
            CaptureError: an argument cannot be recorded, or the caller is capturing a graph.
        """
        refuse_parallel_wrappers(self.table.state.python_state.modules)
        self._arguments = CallArguments(args, kwargs)
        self._choose_device()
        refuse_gradients(self._arguments.tensors, self._arguments.names)
        if self._trained is not None:
            self._trained.begin()
            self._log.numbers = KeptNumbers(self.table)
        # The guard of a step compares the mode of each module that the step can reach.
        root = None if self._trained is not None else root_module(self._function)
        self._caller = caller_of(root, self.table.device)
        self._root = None if root is None else weakref.ref(root)
        self._look_at_compiled()
        for tensor, name in zip(self._arguments.tensors, self._arguments.names, strict=True):
            refuse_own_format(tensor, name)
        with torch.no_grad(), self._deciding():
            self._look_at_inputs()
        if self._compiled:
            self._keep_state()
        own = [one for one in constants(self._arguments.live) if type(one) is torch.Generator]
        for generator in (default_generator(self.table.device), *own, *self.table.state.generators):
            self._log.generators.note(generator)
        self._call = self._arguments.nested(self._inputs)
        try:
            self._enter()
        except BaseException:
            self._end()
            raise
        return self._call

    @property
    def _trained(self) -> TrainedState | None:
        return self.table.state.trained

    def _look_at_inputs(self) -> None:
        """Track a twin of each argument; keep what a write may change of two at once."""
        given = self._arguments
        self._samples = input_samples(given.tensors)
        self._inputs = [self._twin(*one) for one in enumerate(given.tensors)]
        for tensor, name in zip(self._inputs, given.names, strict=True):
            self.table.add_input(tensor, name)
        named = zip(given.names, self._inputs, strict=True)
        self._gradients = LeafGradients([*self.table.state.named_tensors(), *named])
        for first, second, _ in common_memory(self.table, given.tensors, self._inputs):
            for leaf in (first, second):  # if one is written, both may change
                self.table.of(self._inputs[leaf]).keep_before()

    def _twin(self, leaf: int, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for an argument; host constants have their value where all else is fake."""
        if self._fakes is None or tensor.device != self.table.device:
            return alias(tensor)
        return self._fakes.input(tensor, leaf)

    def _choose_device(self) -> None:
        given = self._arguments
        device = recording_device(given.tensors, self.table.state.tensors())
        refuse_capturing(device)
        for tensor, name in zip(given.tensors, given.names, strict=True):
            if tensor.device != device and not may_be_host_constant(tensor):
                others = (
                    "" if device.type == "cpu" else "; only tensors of no dimensions may differ"
                )
                raise CaptureError(
                    f"{name} is on {tensor.device}, and the model or another input on {device}: "
                    f"move the model and its inputs to one device{others}"
                )
        self.table.device = device
        self._log.allocations = Allocations(device)

    def _look_at_compiled(self) -> None:
        """Find out whether torch.compile hides the launches, and whether that can be recorded.

        Raises:
            CaptureError: it does, on a device that runs no opaque launches, or by graphs of its
                own.
        """
        self._compiled = compiled_parts(self._function)
        device = self.table.device
        self._log.allows_unseen = self._fakes is None and self._runs_opaque(device.type)
        if self._fakes is not None:
            refuse_compiled(
                self._compiled, "with weights= nothing is computed, and it launches none"
            )
        elif not self._log.allows_unseen:
            refuse_compiled(
                self._compiled,
                f"on {device.type} they would be one call of the compiled code, from which there "
                "is nothing to gain",
            )
        elif self._compiled:
            refuse_nested_captures(self._function)
            if device.type != "cpu":
                self._host_state = torch.default_generator.get_state()
            self._log.unseen = f"{', '.join(self._compiled)} is compiled by torch.compile"
        self._surroundings = Surroundings.of_caller(
            device, avoids_reads=self._answers.told and not self._compiled
        )

    def _keep_state(self) -> None:
        """Keep what a call may write while nobody watches it."""
        with torch.no_grad():
            self.table.state.keep_before()
            for tracked in self.table:
                tracked.keep_before()

    def _enter(self) -> None:
        enter = self._context.enter_context
        enter(self._log.allocations)
        if not self._compiled:
            enter(self._answers.given())
        enter(not_training() if self._trained is None else self._trained.recording())
        enter(executions_refused())
        if self._fakes is not None:
            enter(self._fakes.recording())
        if self._compiled or self._fakes is not None:
            enter(seeding_noticed(self._log.note_refusal))
        if self._compiled:  # of which the modes would leave nothing
            return
        may_fork = self._trained is not None
        used = self._log.generators
        self._seeding.enter_context(seeding_refused(self._log, used, may_fork=may_fork))
        self._log.generators.begin()  # whoever sets them from now on is noticed
        enter(eager_paths_taken())
        numbers = None if self._trained is None else self._trained.numbers(self._log)
        if numbers is not None:
            enter(numbers.stacked())
        enter(FunctionMode(self._log, numbers))
        enter(dispatch_mode(self._log))

    def call_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin, and make a call that was made before; gives its result, to be finished.

        Raises:
            CaptureError: an argument cannot be recorded, or what was refused first; else whatever
                the call raises. The recording is over then.
        """
        try:
            args, kwargs = self.begin(args, kwargs)
            with called_again():
                return self._function(*args, **kwargs)
        except Exception as error:
            refusal = self.abandon()
            if refusal is None or refusal is error:
                raise
            raise refusal from error
        except BaseException:
            self.abandon()
            raise

    def end_step(self) -> str:
        """Look at what a call that trains left, before its recording is finished.

        Returns:
            What it made that the next call finds, so that this is to be recorded; empty where it
            made nothing of the kind, or does not train.

        Raises:
            CaptureError: it did what a replay would not do again. The recording is over then.
        """
        if self._trained is None:
            return ""
        try:
            self._log.collectives.finish()
            self._context.close()
            self._log.raise_refusal()
            return self._trained.end(self._log)
        except BaseException:
            self.abandon()
            raise

    def agree(self, what: str) -> None:
        """Wait for the ranks that the call has met to come as far.

        Raises:
            CaptureError: a rank has done something else, or refused.
            ExecutionError: one does not come in time.
        """
        if self.rendezvous is not None:
            self.rendezvous.agree(what)

    def guard(self) -> Callable[[], None] | None:
        """What each execution has to compare beforehand; None where the call does not train."""
        return None if self._trained is None else self._trained.guard()

    def finish_unrecorded(self, result: Any) -> Any:
        """End a call of which no Program is made; the result to hand to the caller.

        What it changed in Python is for the call that is recorded to find, and not to change again.

        Raises:
            CaptureError: the result, or a change of an argument, cannot be replayed.
        """
        with self._watched_no_more():
            tensors, structure = self._taken_apart(result)
            return self._handed_out(result, tensors, structure)

    def undo(self) -> None:
        """Let all be as before the call: what it wrote, gradients, and random generators."""
        with torch.no_grad():
            for tracked in self.table:
                if tracked.is_state and tracked.written:
                    tracked.content().copy_(tracked.kept())
            if self._trained is not None:
                self._trained.put_back()
        for generator, state in self._log.generators:
            generator.set_state(state)

    def _handed_out(
        self, result: Any, tensors: Sequence[torch.Tensor], structure: Structure
    ) -> Any:
        """The result for the caller; of a call that trains without its history, as executions."""
        if self._trained is not None:
            tensors = [
                one if one.is_leaf or not one.requires_grad else one.detach() for one in tensors
            ]
            result = unflatten(structure, list(tensors))
        return handed_out(result, tensors, structure, self._given)

    def abandon(self) -> OffloadError | None:
        """Stop without a Program: the call raised.

        Returns:
            What the recorder refused first, if the call raised because of it.
        """
        self._end()
        return self._log.take_refusal()

    def finish(self, result: Any) -> tuple[Any, Recording]:
        """End the recording with what the call returned.

        Returns:
            The result to hand to the caller, with the caller's own tensors in the place of
            aliases, and the Recording.

        Raises:
            CaptureError: the result, or a change that the call made, cannot be replayed.
            OffloadError: what was refused first, if the call swallowed it.
        """
        with self._watched_no_more():
            return self._finished(result)

    @contextlib.contextmanager
    def _watched_no_more(self) -> Iterator[None]:
        try:
            self._log.collectives.finish()
            self._context.close()
            self._log.raise_refusal()  # if the forward swallowed it and took another path
            if not self._compiled:  # whose compiler sets generators
                self._log.generators.check_unseeded()
                self._log.generators.refuse_forked()
            self._seeding.close()
            with torch.no_grad(), self._deciding():
                yield
        finally:
            self._end()

    @property
    def has_deferred(self) -> bool:
        """Whether the call has read on the host what it may not read if it is told to avoid it."""
        return self._log.guards.deferred is not None

    @property
    def read_untold(self) -> str:
        """The first read that was refused, if the call may avoid it when it is told to."""
        return self._log.guards.refused_at if self._answers.may_matter() else ""

    def finish_plain(self, result: Any) -> tuple[Any, PlainCall]:
        """End a call that is to be recorded again, as it read a tensor on the host.

        Returns:
            The result to hand to the caller, and what the call gave and left.

        Raises:
            CaptureError: the result, or a change that the call made, cannot be replayed.
        """
        with self._watched_no_more():
            tensors, structure = self._taken_apart(result)
            self.table.state.check_python()
            if self._trained is None:
                self._gradients.check(self._log)
            for tracked in unseen_changes(self.table, frozenset()):
                tracked.written = True
            guards = self._log.guards
            called = self._plain_call(str(guards.deferred), guards.refused_at, tensors, structure)
            return handed_out(result, tensors, structure, self._given), called

    def _taken_apart(self, result: Any) -> tuple[list[torch.Tensor], Structure]:
        self._arguments.check_unchanged(self._call, self._inputs, self.table)
        try:
            return flatten(result, is_tensor, share_same=True)
        except OpaqueStructure as error:
            raise CaptureError(f"the result cannot be taken apart: {error}") from error

    def _end(self) -> None:
        try:
            self._context.close()
        finally:
            self._seeding.close()
            self._log.allocations.close()

    def plain_call(self, refusal: str, why: str) -> PlainCall | None:
        """What a call gave and left that is over, if it may go otherwise where it is told.

        Args:
            refusal: why it is to be made again, told that it is being compiled.
            why: the same in short.

        Returns:
            None: it has not asked whether it is being compiled.
        """
        if self._returned is None or not self._answers.may_matter():
            return None
        return self._plain_call(refusal, why, *self._returned)

    def _plain_call(
        self, refusal: str, read: str, tensors: Sequence[torch.Tensor], structure: Structure
    ) -> PlainCall:
        drawn = DrawnBefore(self._log.launches, self._log.outcomes)
        return plain_call(
            refusal, read, results=tensors, structure=structure, table=self.table, drawn=drawn
        )

    def finish_seen(self, result: Any) -> WholeProgram:
        """End a recording that is only looked at.

        Raises:
            CaptureError, OffloadError: as `finish`.
        """
        with self._watched_no_more():
            tensors, structure = self._taken_apart(result)
            overlaps, _ = self._check_state()
            return self._seen(tensors, structure).launches(overlaps)

    @property
    def _given(self) -> GivenTensors:
        return GivenTensors(self._arguments.tensors, self._inputs, self.table)

    def _deciding(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._fakes is None else self._fakes.deciding()

    def _seen(self, tensors: Sequence[torch.Tensor], structure: Structure) -> ObservedCall:
        return ObservedCall(
            self.table,
            self._log,
            self._arguments,
            self._inputs,
            self._samples,
            self._parameters,
            self._fakes,
            tuple(result_of(one, self._log, self._inputs) for one in tensors),
            structure,
            self._caller,
            self._root,
        )

    def _finished(self, result: Any) -> tuple[Any, Recording]:
        tensors, structure = self._taken_apart(result)
        if self._keeps_seen:
            self._returned = (tensors, structure)
        seen = self._seen(tensors, structure)
        overlaps, overlapping = self._check_state()
        self._compare_with_plain(result, tensors)
        recording = recording_of(
            seen, overlaps, tuple(tensors), overlapping, keeps_seen=self._keeps_seen
        )
        if self._log.allows_unseen:
            recording = self._with_opaque_form(recording, seen, overlaps)
        return self._handed_out(result, tensors, structure), recording

    def _compare_with_plain(self, result: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Hold a call that was told that it is being compiled against the same one untold.

        Raises:
            CaptureError: they differ.
        """
        if not self._read_untold:
            return
        outcome = "whether it gives what it gives otherwise is not known: nothing was computed"
        if self._plain is not None:
            written = [
                one for one in self.table if one.is_state and one.written and not one.kept_for_step
            ]
            how = self._plain.compare(result, tensors, written)
            outcome = f"it gives {how} as when it is not"
        self._log.guards.notes.append(
            f"avoided: {self._read_untold}: the model was told that it is being compiled "
            f"(torch.compiler.is_compiling), and {outcome}"
        )

    def check_unchanged(self) -> None:
        """Make sure that calls made since the recorded one have left Python's state alone.

        Raises:
            CaptureError: naming the attribute or variable.
        """
        self.table.state.check_python()

    def _check_state(self) -> tuple[tuple[Overlap, ...], Set[int]]:
        """Look for changes of inputs and weights that no launch made.

        Returns:
            The overlaps of inputs, and the storages of these.

        Raises:
            CaptureError: naming the input, attribute or tensor that changed, on a device that runs
                no opaque launches; on others they are marked as written.
        """
        self.table.state.check_python()
        if self._trained is None:
            self._gradients.check(self._log)
        if not self._compiled:  # whose compiler may draw
            self._python_random.warn_of_draws()
        check_undrawn(self._host_state, self._compiled, self.table.device)
        overlaps, overlapping = self._overlapping()
        changed = list(unseen_changes(self.table, overlapping))
        for tracked in changed:
            if not self._compiled:
                self._log.note_unseen(changed_unseen_error(tracked.value.name))
            tracked.written = True
        return self._overlapping() if changed else (overlaps, overlapping)

    def _overlapping(self) -> tuple[tuple[Overlap, ...], Set[int]]:
        overlaps = written_overlaps(self.table, self._arguments.tensors, self._inputs)
        leaves = {leaf for one in overlaps for leaf in (one.first, one.second)}
        return overlaps, {self.table.of(self._inputs[leaf]).storage._cdata for leaf in leaves}

    def _with_opaque_form(
        self, recording: Recording, seen: ObservedCall, overlaps: tuple[Overlap, ...]
    ) -> Recording:
        """The recording with what a device needs to tell whether it is all, or as opaque already.

        Raises:
            CaptureError: the call can only be recorded as one opaque launch, and a tensor that it
                may read cannot be described.
        """
        observed = seen.bound_program(overlaps, folds=False)
        try:
            state = reachable_state(self.table, is_compiled=bool(self._compiled))
        except CaptureError as error:
            if self._log.unseen:
                raise
            return dataclasses.replace(recording, observed=observed, unchecked=str(error))
        call = RepeatableCall(
            self._function,
            self.table.state.python_state,
            self._arguments.live,
            self._arguments.structure,
            seen.structure,
            self._surroundings,
        )
        opaque = seen.opaque_program(
            overlaps, call, self._log.unseen, state=state, is_random=recording.has_drawn
        )
        found = dataclasses.replace(recording, observed=observed, opaque=opaque)
        return found.as_opaque(self._log.unseen) if self._log.unseen else found
