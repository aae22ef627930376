"""Relocates the addresses in a captured model's kernels, by captures in other pools.

The first capture copies everything that moves, and remains where relocation is impossible. A second
capture in other memory shows which words are addresses of what; a third, which copies only what
cannot be followed, must show the same, and is loaded.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from offload.backends.ascend.captured_model import Capture, CapturedModel
from offload.backends.ascend.captured_table import NoTable, install_table, table_parts
from offload.backends.ascend.captured_tasks import ModelCapture, Task
from offload.backends.ascend.captured_words import RelocatedWords, relocated_words
from offload.backends.ascend.streaming import StreamedWeights
from offload.backends.captured.copied_values import CopiedValue
from offload.backends.captured.opaque_weights import device_weights
from offload.backends.captured.relocation.captures import OwnedRange
from offload.backends.captured.relocation.fixed_weights import ranges_of
from offload.backends.captured.relocation.words import CapturesDiffer
from offload.errors import (
    BackendUnavailable,
    CaptureError,
    ExecutionError,
    OffloadError,
    OutOfMemory,
    OutOfStreams,
)
from offload.native import _native
from offload.program import BoundProgram


@dataclasses.dataclass(frozen=True, slots=True)
class BoundModel:
    """A captured model, and how it follows moving tensors.

    Attributes:
        model: as it is loaded.
        words: the patched words of its kernels; None where everything that moves is copied.
        tasks: the tasks whose arguments contain the words.
        arguments: where those kernels read their arguments, in words for people.
        why_copied: why everything is copied; empty where words are patched.
        streamed: weights that it copies, whose addresses its kernels hold.
        residents: the resident made of it, while that lives; it owns the model.
        proved: the result of the proof, in sentences for people.
    """

    model: CapturedModel
    words: RelocatedWords | None = None
    tasks: Sequence[Task] = ()
    arguments: str = ""
    why_copied: str = ""
    streamed: StreamedWeights = dataclasses.field(default_factory=StreamedWeights)
    residents: list[weakref.ref[_native.AscendCapturedResident]] = dataclasses.field(
        default_factory=list
    )
    proved: list[str] = dataclasses.field(default_factory=list)


class _NotRelocatable(Exception):
    """Why a model must work on copies; the error is for callers that require relocation."""

    def __init__(self, error: OffloadError) -> None:
        super().__init__(str(error))
        self.error = error


class Relocator:
    """Relocates one Program's model, on the capture's thread.

    Owner: one preparation. The result is in `bound`, as the capture returns only the model.
    """

    def __init__(
        self,
        bound: BoundProgram,
        device: int,
        streamed: StreamedWeights,
        *,
        is_required: bool,
        why_no_table: str = "",
    ) -> None:
        """Begin without captures.

        Args:
            bound: the captured program.
            device: its index.
            streamed: the streamed weights.
            is_required: whether a model that copies everything is refused.
            why_no_table: why kernels keep the runtime's argument blocks; empty: they get a table of
                offload's where the runtime allows it.
        """
        program = bound.program
        self._program = program
        self._device = device
        self._is_required = is_required
        self._why_no_table = why_no_table
        self._streamed = streamed
        stay = [one for one in device_weights(program) if one.index not in streamed.storages]
        self._weights = ranges_of(bound, stay)
        if streamed.storages:  # one range: transfers change the weight at an address
            self._weights.append(OwnedRange(*streamed.memory, "streamed weights"))
        self.bound: BoundModel | None = None

    def improve(self, first: CapturedModel, capture: Capture) -> CapturedModel:
        """Return the model to load; close the others.

        Raises:
            CaptureError, BackendUnavailable: relocation is required and impossible; the error says
                why.
            CaptureError, ExecutionError: another capture failed. If memory or streams ran out
                (OutOfMemory, OutOfStreams) and relocation is not required, the first model is used
                instead.
        """
        try:
            self.bound = self._relocate(first, capture)
        except _NotRelocatable as reason:
            if self._is_required:
                first.close()
                raise reason.error from None
            self.bound = BoundModel(first, why_copied=str(reason.error), streamed=self._streamed)
        except BaseException:
            first.close()
            raise
        if self.bound.model is not first:
            first.close()
        return self.bound.model

    def _relocate(self, first: CapturedModel, capture: Capture) -> BoundModel:
        one = self._read(first)
        second = _once_more(capture, first.moving)
        try:
            other = self._read(second)
            second.end()  # its stream is needed, and its memory must not be reused
            found = self._compare(one, other, other)
            copied = [moving for moving in first.moving if moving.value in found.copied]
            return self._bind(capture, copied, found, [one, other])
        finally:
            second.close()

    def _bind(
        self,
        capture: Capture,
        copied: Sequence[CopiedValue],
        found: RelocatedWords,
        others: Sequence[ModelCapture],
    ) -> BoundModel:
        """Return the model to load, with an argument table; captured again if that spoils it."""
        why = self._why_no_table
        while True:
            model = _once_more(capture, copied)
            try:
                template = self._read(model)
                words = self._compare(template, *others)
                if not words.same_choice(found):
                    raise _NotRelocatable(
                        CaptureError(
                            "a third capture does not have the same addresses as the two before"
                        )
                    )
                if not why:
                    parts = table_parts(self._program, [template, *others], words)
                    install_table(self._device, model, parts)
            except NoTable as reason:
                why = str(reason)
                if reason.is_spoiled:
                    model.close()
                    continue
            except BaseException:
                model.close()
                raise
            arguments = _described(model.table, why)
            return BoundModel(model, words, template.tasks, arguments, streamed=self._streamed)

    def _compare(self, *captures: ModelCapture) -> RelocatedWords:
        try:
            others = [(one["address"], one["total_size"]) for one in _memory_of_torch()]
            found = relocated_words(self._program, captures, self._weights, others)
        except CapturesDiffer as error:
            raise _NotRelocatable(CaptureError(f"captures differ: {error}")) from error
        except CaptureError as error:
            raise _NotRelocatable(error) from error
        if not found.discovery.words:
            reasons = "; ".join(sorted(set(found.copied.values()))) or "no input or output is used"
            raise _NotRelocatable(
                CaptureError(f"no address of an input or output can be followed: {reasons}")
            )
        return found

    def _read(self, model: CapturedModel) -> ModelCapture:
        """Return the runtime's report on a captured model."""
        try:
            if model.log.why_unreported:
                raise BackendUnavailable(model.log.why_unreported)
            reported = _native.ascend_captured_tasks(self._device, model.handle)
        except (BackendUnavailable, ExecutionError) as error:
            raise _NotRelocatable(error) from error
        n_tasks = model.log.n_tasks
        # Streams are only added; without launches no task belongs to one.
        n_streams = len(n_tasks[-1]) if n_tasks else 0
        counts = [
            [one[index] if index < len(one) else 0 for one in n_tasks] for index in range(n_streams)
        ]
        tasks = []
        n_seen = [0] * n_streams
        for number, (stream, kind, function, n_blocks, address, arguments) in enumerate(reported):
            if stream >= n_streams:
                continue  # copies behind the last launch, on additional streams
            launch = _launch_of(counts[stream], model.log.begins, n_seen[stream])
            n_seen[stream] += 1
            if launch is not None:
                tasks.append(Task(kind, function, n_blocks, address, arguments, launch, number))
        return ModelCapture(
            tuple(tasks),
            dict(model.log.places),
            tuple(model.log.pool),
            tuple(model.random_cells),
        )


def _described(table: _native.AscendCapturedTable | None, why_none: str) -> str:
    if table is None:
        return (
            "of the runtime, each copied when one of its words changed, since they are not in one "
            f"table ({why_none})"
        )
    return (
        f"of one table of {table.size_bytes} bytes, which the kernels received at load "
        f"({table.n_set} tasks set, {table.n_updates} update), and whose changes one copy "
        "transfers"
    )


def _launch_of(counts: Sequence[int], begins: Sequence[int | None], number: int) -> int | None:
    """Return the launch that made a stream's task of this number; None: copies around launches."""
    moment = bisect.bisect_right(counts, number) - 1
    return begins[moment] if moment >= 0 else None


def _once_more(capture: Capture, copied: Sequence[CopiedValue]) -> CapturedModel:
    """Capture again, where memory or streams may not suffice beside the earlier captures."""
    try:
        return capture(copied)
    except (OutOfMemory, OutOfStreams) as error:
        raise _NotRelocatable(
            type(error)(f"no memory for the captures that relocation needs: {error}")
        ) from error


def _memory_of_torch() -> list[dict[str, int]]:
    npu: Any = torch.npu  # type: ignore[attr-defined]
    pieces: list[dict[str, int]] = npu.memory_snapshot()
    return pieces
