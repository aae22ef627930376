"""One capture of a Program by torch_npu: a model on memory of separate pools."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from offload.backends.ascend.captured_model import CapturedModel
from offload.backends.ascend.failed_captures import (
    abandon,
    check_streams,
    refused_advice,
    unjoined_advice,
)
from offload.backends.ascend.random_cells import CellFinder
from offload.backends.ascend.streaming import StreamedWeights
from offload.backends.captured.copied_values import CopiedValue
from offload.backends.captured.torch_warm_up import (
    Bases,
    captured_bases,
    collector_off,
    failures_of,
    last_uses_of,
)
from offload.errors import (
    BackendUnavailable,
    CaptureError,
    ExecutionError,
    OffloadError,
    OutOfMemory,
)
from offload.interpreter.device_failures import failure_of_torch, first_line
from offload.interpreter.eager_run import EagerRun
from offload.interpreter.memory_pools import MemoryPool, region, segments_of
from offload.native import _native
from offload.program import BoundProgram, Launch, Role, Value


class OneCapture:
    """One capture of a Program on the current stream.

    Attributes:
        log: the record of the capture; without tasks and places once it says why these are not
            reported.
    """

    def __init__(
        self,
        bound: BoundProgram,
        device: int,
        stream: Any,
        form: str | None,
        moving: Sequence[CopiedValue],
        *,
        cells: CellFinder,
        streamed: StreamedWeights,
    ) -> None:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        self._program = bound.program
        self._bound = bound
        self._device = torch.device("npu", device)
        self._stream = stream
        self._handle: int = stream.npu_stream
        self._streamed = streamed.storages
        self._pool = MemoryPool(self._device)
        self._pool_of_inputs = MemoryPool(self._device)
        self._n_reserved_bytes = 0
        self._graph = npu.NPUGraph()
        self._cells = cells
        self._tensors: list[Any] = []
        self._copies = _native.AscendMovingCopies(
            device=device,
            tensors=[(one.size_bytes, one.copied_in, one.copied_out) for one in moving],
            form=form,
        )
        pools = [self._pool, self._pool_of_inputs]
        self._model = CapturedModel(
            self._graph,
            pools,
            self._tensors,
            moving,
            self._copies,
            steps=streamed.steps_of_model(),
        )
        self.log = self._model.log

    def run(self) -> CapturedModel:
        """Capture; a failure leaves nothing behind."""
        try:
            with region(), collector_off():
                self._capture()
            self._cells.check_captured(self._program.launches)
        except BaseException:
            del self._graph
            self._model.close()
            raise
        self._model.take_cells(self._cells, self._device)
        return self._model

    def _capture(self) -> None:
        run = EagerRun(self._bound, self._bases(), fill=None)
        self._tensors.append(run.bases)
        last_uses = last_uses_of(self._bound)
        try:
            self._begin()
            self._model.handle = _native.ascend_capturing_model(self._handle)
            self._copies.capture_in(self._handle)
            for launch in self._program.launches:
                self._before(launch)
                with self._cells.launching(launch):
                    self._launch(run, launch)
                self._note(run, launch)
                for value in last_uses.get(launch.index, ()):
                    run.bases.pop(value, None)  # later launches use its memory
            self._set_places(run)
            self._copies.capture_out(self._handle)
            if self._model.steps is not None:
                self._model.steps.end(self._handle)
            self._end()
        except BaseException:
            abandon(self._graph, self._pool, self._handle, self._device.index)
            raise

    def _bases(self) -> Bases:
        """Return weights in their place, host constants, and memory of the pool for inputs."""
        with self._pool_of_inputs.use():
            return captured_bases(self._bound, self._given)

    def _given(self, value: Value) -> torch.UntypedStorage | None:
        if value.role is Role.WEIGHT:
            return self._streamed.get(value.index)
        memory = self._memory(value.size_bytes)
        if value.size_bytes:
            self.log.places[value.index] = memory.data_ptr()
        return memory

    def _memory(self, size_bytes: int) -> torch.UntypedStorage:
        try:
            place = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise failure_of_torch(
                error, f"no memory for the {size_bytes} bytes of an input in a capture"
            ) from error
        return place.untyped_storage()

    def _begin(self) -> None:
        try:
            self._graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
        except RuntimeError as error:
            check_streams(error, "a capture cannot begin")
            why = first_line(error) + refused_advice(error)
            raise ExecutionError(f"a capture cannot begin: {why}") from error

    def _before(self, launch: Launch) -> None:
        """Put steps before a launch on the streams; later tasks belong to the launch."""
        if self._model.steps is not None:
            self._model.steps.before(launch.index, self._handle)
        elif self.log.begins:  # unchanged since the last moment
            self.log.begins[-1] = launch.index
            return
        self._note_tasks(launch.index)

    def _launch(self, run: EagerRun, launch: Launch) -> None:
        with failures_of(launch, "the capture", functools.partial(_failure, launch)):
            outcome = run.call(launch)()
            self._stream.npu_stream  # noqa: B018 - until it is launched, so that errors are its own
        run.keep(launch, outcome)

    def _note(self, run: EagerRun, launch: Launch) -> None:
        """Note what a launch has added: tasks, Values, pieces of the pool."""
        self._note_tasks(None)
        if self.log.why_unreported:
            return
        for view in (*launch.views(), *launch.made()):
            value = self._program.values[view.value]
            if value.role in (Role.ACTIVATION, Role.OUTPUT):
                storage, begin_bytes = run.bases[value.index]
                self.log.places[value.index] = storage.data_ptr() + begin_bytes
        npu: Any = torch.npu  # type: ignore[attr-defined]
        n_reserved_bytes = npu.memory_reserved(self._device)
        if n_reserved_bytes != self._n_reserved_bytes:  # enumerating the pieces takes longer
            self._n_reserved_bytes = n_reserved_bytes
            self.log.pool += [one for one in self._pieces() if one not in self.log.pool]

    def _pieces(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the device memory that launches took, without cells.

        The order does not depend on addresses, even where one launch takes several at once.
        """
        segments = [*segments_of(self._pool, self._device), *self._cells.segments_of_launches()]
        segments.sort(key=lambda one: (one["total_size"], one["stream"]))
        return [(one["address"], one["total_size"]) for one in segments]

    def _note_tasks(self, begins: int | None) -> None:
        """Note the numbers of tasks; a refusal leaves the capture intact, and ends the queries."""
        if self.log.why_unreported:
            return
        try:
            counts = _native.ascend_count_tasks(self._device.index, self._model.handle)
        except (BackendUnavailable, ExecutionError) as error:
            self.log.why_unreported = str(error)
        else:
            self.log.n_tasks.append(counts)
            self.log.begins.append(begins)

    def _set_places(self, run: EagerRun) -> None:
        for index, one in enumerate(self._model.moving):
            storage, begin_bytes = run.bases[one.value]
            self._copies.set_place(index, storage.data_ptr() + begin_bytes)

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError as error:
            check_streams(error, "the capture of the program's launches failed")
            raise CaptureError(
                f"the capture of the program's launches failed: {first_line(error)}"
                + unjoined_advice(error, self._program.launches, self.log.n_tasks, self.log.begins)
            ) from error


def _failure(launch: Launch, error: Exception) -> OffloadError:
    """Convert the exception of a launch under capture to an error of offload."""
    what, why = f"{launch.source}: {launch.name}", first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemory(f"{what} ran out of memory in the capture: {why}")
    if isinstance(error, RuntimeError):
        check_streams(error, f"{what} cannot be captured")
    return CaptureError(f"{what} cannot be captured by torch_npu: {why}")
