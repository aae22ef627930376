"""Makes the addresses in a captured model's own kernels follow tensors: by captures in other pools.

The first capture copies all that moves, and is what remains where relocation is not possible. A
second one in other memory tells which words are addresses of what; a third one, which copies only
what cannot be followed, has to show the same, and is the model that is loaded.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from offload.backends.ascend.captured_model import Capture, CapturedModel
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
    """A captured model, and how it follows what moves.

    Attributes:
        model: as it is loaded.
        words: what is patched in its kernels; None where all that moves is copied.
        tasks: whose arguments the words are.
        why_copied: why all is copied; empty where words are patched.
        streamed: weights that it copies, whose places its kernels have.
        residents: the one that was made of it, as long as that lives; it owns the model.
        proved: what the proof allowed, in sentences for people.
    """

    model: CapturedModel
    words: RelocatedWords | None = None
    tasks: Sequence[Task] = ()
    why_copied: str = ""
    streamed: StreamedWeights = dataclasses.field(default_factory=StreamedWeights)
    residents: list[weakref.ref[_native.AscendCapturedResident]] = dataclasses.field(
        default_factory=list
    )
    proved: list[str] = dataclasses.field(default_factory=list)


class _NotRelocatable(Exception):
    """Why a model has to work on copies; the error is for whoever required otherwise."""

    def __init__(self, error: OffloadError) -> None:
        super().__init__(str(error))
        self.error = error


class Relocator:
    """Relocates one Program's model, on the capture's thread.

    Owner: one preparation. The result is in `bound`, as the capture gives only the model.
    """

    def __init__(
        self, bound: BoundProgram, device: int, streamed: StreamedWeights, *, is_required: bool
    ) -> None:
        program = bound.program
        self._program = program
        self._device = device
        self._is_required = is_required
        self._streamed = streamed
        stay = [one for one in device_weights(program) if one.index not in streamed.storages]
        self._weights = ranges_of(bound, stay)
        if streamed.storages:  # one range: whose a place is changes with what is brought there
            self._weights.append(OwnedRange(*streamed.memory, "weights that are brought"))
        self.bound: BoundModel | None = None

    def improve(self, first: CapturedModel, capture: Capture) -> CapturedModel:
        """The model that is loaded; the others are closed.

        Raises:
            CaptureError, BackendUnavailable: relocation is required, and this is why it cannot be
                had.
            CaptureError, ExecutionError: another capture failed. Only if it was for memory or
                streams (OutOfMemory, OutOfStreams), and relocation is not required, the first one
                does.
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
            second.end()  # its stream is needed, and its memory must not be used again
            found = self._compare(one, other, other)
            third = _once_more(
                capture, [moving for moving in first.moving if moving.value in found.copied]
            )
            try:
                template = self._read(third)
                again = self._compare(template, one, other)
                if not again.same_choice(found):
                    raise _NotRelocatable(
                        CaptureError(
                            "a third capture does not tell the same addresses as two before"
                        )
                    )
            except BaseException:
                third.close()
                raise
        finally:
            second.close()
        return BoundModel(third, again, template.tasks, streamed=self._streamed)

    def _compare(self, *captures: ModelCapture) -> RelocatedWords:
        try:
            others = [(one["address"], one["total_size"]) for one in _memory_of_torch()]
            found = relocated_words(self._program, captures, self._weights, others)
        except CapturesDiffer as error:
            raise _NotRelocatable(CaptureError(f"captures differ: {error}")) from error
        except CaptureError as error:
            raise _NotRelocatable(error) from error
        if not found.discovery.words:
            reasons = "; ".join(sorted(set(found.copied.values()))) or "none is used"
            raise _NotRelocatable(
                CaptureError(f"no address of an input or output can be followed: {reasons}")
            )
        return found

    def _read(self, model: CapturedModel) -> ModelCapture:
        """What the runtime tells of a captured model."""
        try:
            if model.log.why_untold:
                raise BackendUnavailable(model.log.why_untold)
            told = _native.ascend_captured_tasks(self._device, model.handle)
        except (BackendUnavailable, ExecutionError) as error:
            raise _NotRelocatable(error) from error
        n_tasks = model.log.n_tasks
        # None goes, and some may come; without launches no task is one's.
        n_streams = len(n_tasks[-1]) if n_tasks else 0
        counts = [
            [one[index] if index < len(one) else 0 for one in n_tasks] for index in range(n_streams)
        ]
        tasks = []
        n_seen = [0] * n_streams
        for stream, kind, function, n_blocks, address, arguments in told:
            if stream >= n_streams:
                continue  # copies behind the last launch that did not fit on the others
            launch = _launch_of(counts[stream], model.log.begins, n_seen[stream])
            n_seen[stream] += 1
            if launch is not None:
                tasks.append(Task(kind, function, n_blocks, address, arguments, launch))
        return ModelCapture(
            tuple(tasks),
            dict(model.log.places),
            tuple(model.log.pool),
            tuple(model.random_cells),
        )


def _launch_of(counts: Sequence[int], begins: Sequence[int | None], number: int) -> int | None:
    """The launch that made a stream's task of this number; None: copies around the launches."""
    moment = bisect.bisect_right(counts, number) - 1
    return begins[moment] if moment >= 0 else None


def _once_more(capture: Capture, copied: Sequence[CopiedValue]) -> CapturedModel:
    """Another capture, for which there may be no room besides those before."""
    try:
        return capture(copied)
    except (OutOfMemory, OutOfStreams) as error:
        raise _NotRelocatable(
            type(error)(f"no room for the captures that relocation takes: {error}")
        ) from error


def _memory_of_torch() -> list[dict[str, int]]:
    npu: Any = torch.npu  # type: ignore[attr-defined]
    pieces: list[dict[str, int]] = npu.memory_snapshot()
    return pieces
