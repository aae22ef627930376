"""The Recorder: watches one call through torch's dispatch and function modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from offload.errors import CaptureError
from offload.interpreter.generator_states import set_own_state
from offload.program import Overlap, Watched
from offload.program.structure import (
    OpaqueStructure,
    Structure,
    flatten,
    unflatten,
)
from offload.record.call_state import reachable_state, unseen_changes
from offload.record.drawn_before import DrawnBefore
from offload.record.host_constants import check_undrawn
from offload.record.input_overlaps import written_overlaps
from offload.record.model_state import changed_unseen_error
from offload.record.operators import is_tensor
from offload.record.plain_call import PlainCall, plain_call
from offload.record.recording import Recording, recording_of
from offload.record.repeatable_call import RepeatableCall
from offload.record.results import GivenTensors, handed_out, result_of
from offload.record.watched_call import WatchedCall
from offload.record.whole_program import ObservedCall, WholeProgram


class Recorder(WatchedCall):
    """Records exactly one call, between `begin` and `finish` (or `abandon`).

    Owner: one with-block. Thread: the one that calls the model; work of other threads is not seen.
    Results that depend on it are refused, or on a device that runs opaque launches make the call
    such a launch.
    """

    def end_step(self) -> str:
        """Examine the effects of a call that trains, before its recording is finished.

        Returns:
            The state that it made and that the next call finds, so that the next call is to be
            recorded; empty where it made no such state, or does not train.

        Raises:
            CaptureError: it did something that a replay would not repeat. This ends the recording.
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
        """Wait until the ranks that the call has met reach the same point.

        Raises:
            CaptureError: a rank has done something else, or refused.
            ExecutionError: a rank does not arrive in time.
        """
        if self.rendezvous is not None:
            self.rendezvous.agree(what)

    def guard(self) -> Callable[[], Watched] | None:
        """The comparison before each execution; None where the call does not train."""
        return None if self._trained is None else self._trained.guard()

    def finish_unrecorded(self, result: Any) -> Any:
        """End a call that yields no Program; return the result for the caller.

        The recorded call must find its changes in Python, and must not repeat them.

        Raises:
            CaptureError: the result, or a change of an argument, cannot be replayed.
        """
        with self._watched_no_more():
            tensors, structure = self._taken_apart(result)
            return self._handed_out(result, tensors, structure)

    def undo(self) -> None:
        """Restore the state before the call: what it wrote, gradients, and random generators."""
        with torch.no_grad():
            for tracked in self.table:
                if tracked.is_state and tracked.written:
                    tracked.content().copy_(tracked.kept())
            if self._trained is not None:
                self._trained.put_back()
        for generator, state in self._log.generators:
            set_own_state(generator, state)

    def _handed_out(
        self, result: Any, tensors: Sequence[torch.Tensor], structure: Structure
    ) -> Any:
        """Return the caller's result; without history if the call trains, as executions do."""
        if self._trained is not None:
            tensors = [
                one if one.is_leaf or not one.requires_grad else one.detach() for one in tensors
            ]
            result = unflatten(structure, list(tensors))
        return handed_out(result, tensors, structure, self._given)

    def finish(self, result: Any) -> tuple[Any, Recording]:
        """End the recording with what the call returned.

        Returns:
            The result for the caller, with the caller's own tensors in place of aliases, and the
            Recording.

        Raises:
            CaptureError: the result, or a change that the call made, cannot be replayed.
            OffloadError: the first refusal, if the call swallowed it.
        """
        with self._watched_no_more():
            return self._finished(result)

    def finish_plain(self, result: Any) -> tuple[Any, PlainCall]:
        """End a call that is to be recorded again because it read a tensor on the host.

        Returns:
            The result for the caller, and the call's results and effects.

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
            raise CaptureError(f"the result cannot be flattened into tensors: {error}") from error

    def plain_call(self, refusal: str, why: str) -> PlainCall | None:
        """Return the outcome of a finished call, if `is_compiling()` may change it.

        Args:
            refusal: why it is to be repeated with `is_compiling()` true.
            why: the same in short.

        Returns:
            None: it did not ask whether it is compiled.
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
        """End a recording that is only inspected.

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
        """Compare a call with `is_compiling()` true with the same call with false.

        Raises:
            CaptureError: they differ.
        """
        if not self._avoided_read:
            return
        outcome = "whether its results are the same as otherwise is not known: nothing was computed"
        if self._plain is not None:
            written = [
                one for one in self.table if one.is_state and one.written and not one.kept_for_step
            ]
            how = self._plain.compare(result, tensors, written)
            outcome = f"it gives {how} as otherwise"
        self._log.guards.notes.append(
            f"avoided: {self._avoided_read}: the call was recorded with "
            f"torch.compiler.is_compiling() returning True, and {outcome}"
        )

    def check_unchanged(self) -> None:
        """Check that calls made since the recorded one left the Python state unchanged.

        Raises:
            CaptureError: they did not; it names the attribute or variable.
        """
        self.table.state.check_python()

    def _check_state(self) -> tuple[tuple[Overlap, ...], Set[int]]:
        """Find changes of inputs and weights that no launch made.

        Returns:
            The overlaps of inputs, and the storages of these inputs.

        Raises:
            CaptureError: an input, attribute or tensor changed, on a device that runs no opaque
                launches; it is named. On other devices the changed ones are marked as written.
        """
        self.table.state.check_python()
        if self._trained is None:
            self._gradients.check(self._log)
        if not self._compiled:  # the compiler may draw
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
        """Return the recording with the data for a completeness check, or already as opaque.

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
            dataclasses.replace(self._surroundings, runs_originals=self._log.runs_originals),
        )
        opaque = seen.opaque_program(
            overlaps, call, self._log.unseen, state=state, is_random=recording.has_drawn
        )
        found = dataclasses.replace(recording, observed=observed, opaque=opaque)
        return found.as_opaque(self._log.unseen) if self._log.unseen else found
