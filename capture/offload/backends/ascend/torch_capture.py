"""Captures a Program's launches with torch_npu, into a model on memory of pools of its own."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from offload import _native
from offload.backends.ascend.captured_model import (
    CapturedModel,
    Improve,
    Moving,
    moving_values,
)
from offload.backends.ascend.failed_captures import abandon, check_streams, unjoined_advice
from offload.backends.ascend.random_cells import CellFinder, DrawLog
from offload.backends.ascend.streaming import StreamedWeights
from offload.backends.random_draws import generators_of, own_random_states
from offload.backends.torch_warm_up import (
    Bases,
    collector_off,
    failure_of_torch,
    first_line,
    last_uses_of,
    warm_up,
)
from offload.eager_run import EagerRun, host_storage
from offload.errors import (
    BackendUnavailable,
    CaptureError,
    ExecutionError,
    OffloadError,
    OutOfMemory,
)
from offload.memory_pools import segments_of
from offload.program import Launch, Program, Role

# A capture borrows what the process has once: the routes of torch_npu's allocator.
_one_at_a_time = threading.Lock()

NONE_STREAMED = StreamedWeights()


class TorchCapturer:
    """Captures with torch_npu; each Program is warmed up once.

    Owner: one preparation of a Program. Thread: any, one call at a time; captures of several
    capturers wait for each other.
    """

    def __init__(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Begin with nothing warmed up.

        Args:
            inputs: a call's tensors in the Program's order, for the warm-up, which reads them;
                None: zeros, which are an index into anything.
        """
        self._inputs = inputs
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "offload-capture")

    def capture(
        self,
        program: Program,
        device: int,
        form: str | None,
        *,
        improve: Improve | None = None,
        streamed: StreamedWeights = NONE_STREAMED,
    ) -> CapturedModel:
        """Run every launch twice, to warm up and under capture, where nothing executes.

        Leaves generators, inputs, weights and torch's settings as they were, also when it fails.

        Args:
            program: its launches, in order.
            device: where.
            form: who copies what moves, `captured` or `enqueued`; None: what the runtime can.
            improve: makes a better model of it by more captures, or gives it back.
            streamed: where weights in files lie, and their copies, which are captured between
                launches; a launch is a node of its steps.

        Raises:
            CaptureError: a launch cannot be captured (the message names it), an input cannot be
                copied, or the caller is capturing; or what `improve` raises.
            BackendUnavailable: the runtime captures no copies, and they were asked for.
            OutOfMemory: the device has no memory.
            ExecutionError: the device failed.
        """
        npu: Any = torch.npu  # type: ignore[attr-defined]
        moving = moving_values(program)
        try:
            if npu.is_current_stream_capturing():
                raise CaptureError(
                    "a graph is being captured on the current stream: load the program before the "
                    "capture begins"
                )
            ready = npu.current_stream(device).record_event()
            work = functools.partial(
                self._on_thread,
                program,
                device,
                form=form,
                moving=moving,
                improve=improve,
                streamed=streamed,
            )
            return self._thread.submit(work, ready).result()
        except OffloadError:
            raise
        except RuntimeError as error:  # of torch_npu's streams, events and pools
            raise failure_of_torch(error, "preparing a capture failed") from error

    def _on_thread(
        self,
        program: Program,
        device: int,
        ready: Any,
        *,
        form: str | None,
        moving: list[Moving],
        improve: Improve | None,
        streamed: StreamedWeights,
    ) -> CapturedModel:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        with _one_at_a_time, npu.device(device), torch.no_grad():
            stream = npu.Stream(device)
            with npu.stream(stream):
                stream.wait_event(ready)
                on_npu = torch.device("npu", device)
                generators = generators_of(program, on_npu)
                cells = CellFinder(on_npu)

                def capture(copied: Sequence[Moving]) -> CapturedModel:
                    one = _OneCapture(
                        program, device, stream, form, copied, cells=cells, streamed=streamed
                    )
                    if improve is None:
                        one.log.why_untold = "nobody compares captures"
                    return one.run()

                try:
                    with own_random_states(generators, on_npu):
                        draws = DrawLog(generators)
                        warm_up(program, on_npu, self._inputs, launched=draws.note)
                        cells.expect(draws)
                        model = capture(moving)
                        if improve is None or model.random_states:
                            return model
                        return improve(model, capture)
                except BaseException:
                    cells.pools.clear()  # once the states of generators that lie there have gone
                    raise


class _OneCapture:
    """One capture of a Program on the current stream.

    Attributes:
        log: what is seen meanwhile; nothing of tasks and places once it says why that is untold.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        stream: Any,
        form: str | None,
        moving: Sequence[Moving],
        *,
        cells: CellFinder,
        streamed: StreamedWeights,
    ) -> None:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        self._program = program
        self._device = torch.device("npu", device)
        self._stream = stream
        self._handle: int = stream.npu_stream
        self._streamed = streamed
        self._pool = npu.MemPool()
        self._pool_of_inputs = npu.MemPool()
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
        self._model = CapturedModel(self._graph, pools, self._tensors, moving, self._copies)
        self.log = self._model.log

    def run(self) -> CapturedModel:
        """Capture; what failed leaves nothing behind."""
        try:
            with collector_off():
                self._capture()
            self._cells.check_captured(self._program.launches)
        except BaseException:
            del self._graph
            self._model.close()
            raise
        self._model.take_cells(self._cells, self._device)
        return self._model

    def _capture(self) -> None:
        run = EagerRun(self._program, self._bases(), fill=None)
        self._tensors.append(run.bases)
        last_uses = last_uses_of(self._program)
        try:
            self._begin()
            self._model.handle = _native.ascend_capturing_model(self._handle)
            self._copies.capture_in(self._handle)
            self._note_tasks()
            steps = self._streamed.steps
            for launch in self._program.launches:
                if steps is not None:
                    steps.before(launch.index, self._handle)
                with self._cells.launching(launch):
                    self._launch(run, launch)
                self._note(run, launch)
                for value in last_uses.get(launch.index, ()):
                    run.bases.pop(value, None)  # its memory is for later launches
            self._set_places(run)
            self._copies.capture_out(self._handle)
            if steps is not None:
                steps.end(self._handle)
            self._end()
        except BaseException:
            abandon(self._graph, self._pool, self._handle, self._device.index)
            raise

    def _bases(self) -> Bases:
        """Weights where they are or are brought, host constants, memory of the pool for inputs."""
        npu: Any = torch.npu  # type: ignore[attr-defined]
        bases: Bases = {}
        with npu.use_mem_pool(self._pool_of_inputs, self._device):
            for value in self._program.values:
                if value.host_content is not None:
                    bases[value.index] = (host_storage(value.host_content), 0)
                elif value.index in self._streamed.storages:
                    bases[value.index] = (self._streamed.storages[value.index], 0)
                elif value.role is Role.WEIGHT:
                    holder = self._program.weights[value.index][0]
                    bases[value.index] = (holder.untyped_storage(), 0)
                elif value.role is Role.INPUT:
                    memory = self._memory(value.size_bytes)
                    bases[value.index] = (memory, 0)
                    if value.size_bytes:
                        self.log.places[value.index] = memory.data_ptr()
        return bases

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
            raise ExecutionError(f"a capture cannot begin: {first_line(error)}") from error

    def _launch(self, run: EagerRun, launch: Launch) -> None:
        try:
            outcome = run.call(launch)()
            self._stream.npu_stream  # noqa: B018 - until it is launched, so that errors are its own
        except CaptureError:
            raise
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{launch.source}: {launch.operator} found no memory in the capture: "
                f"{first_line(error)}"
            ) from error
        except Exception as error:
            if isinstance(error, RuntimeError):
                check_streams(error, f"{launch.source}: {launch.operator} cannot be captured")
            raise CaptureError(
                f"{launch.source}: {launch.operator} cannot be captured by torch_npu: "
                f"{first_line(error)}"
            ) from error
        run.keep(launch, outcome)

    def _note(self, run: EagerRun, launch: Launch) -> None:
        """What a launch has added: tasks, Values, pieces of the pool."""
        self._note_tasks()
        if self.log.why_untold:
            return
        for view in (*launch.views(), *launch.made()):
            value = self._program.values[view.value]
            if value.role in (Role.ACTIVATION, Role.OUTPUT):
                storage, begin_bytes = run.bases[value.index]
                self.log.places[value.index] = storage.data_ptr() + begin_bytes
        npu: Any = torch.npu  # type: ignore[attr-defined]
        n_reserved_bytes = npu.memory_reserved(self._device)
        if n_reserved_bytes != self._n_reserved_bytes:  # asking for the pieces takes longer
            self._n_reserved_bytes = n_reserved_bytes
            new = set(_pieces(self._pool, self._device)) - set(self.log.pool)
            self.log.pool += sorted(new, key=lambda one: one[1])

    def _note_tasks(self) -> None:
        """A refused question leaves the capture as it is; nothing is asked any more then."""
        if self.log.why_untold:
            return
        try:
            counts = _native.ascend_count_tasks(self._device.index, self._model.handle)
        except (BackendUnavailable, ExecutionError) as error:
            self.log.why_untold = str(error)
        else:
            self.log.n_tasks.append(counts)

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
                f"{unjoined_advice(error, self._program.launches, self.log.n_tasks)}"
            ) from error


def _pieces(pool: Any, device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes) of what a pool has taken from the device."""
    return [(one["address"], one["total_size"]) for one in segments_of(pool, device)]
