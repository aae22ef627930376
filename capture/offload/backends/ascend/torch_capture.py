"""Captures a Program's launches with torch_npu, into a model on memory of pools of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from offload import _native
from offload.backends.ascend.captured_model import (
    CapturedModel,
    Improve,
    Moving,
    moving_values,
)
from offload.backends.ascend.failed_captures import (
    abandon,
    check_streams,
    refused_advice,
    unjoined_advice,
)
from offload.backends.ascend.launch_times import N_ROUNDS
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
from offload.made_up_inputs import input_tensors, made_up_inputs
from offload.memory_pools import MemoryPool, region, segments_of
from offload.program import Launch, Program, Role

# A capture borrows what the process has once: the routes of torch_npu's allocator.
_one_at_a_time = threading.Lock()

NONE_STREAMED = StreamedWeights()

T = TypeVar("T")


class TorchCapturer:
    """Captures with torch_npu; each Program is warmed up once.

    Owner: one preparation of a Program. Thread: any, one call at a time; captures of several
    capturers wait for each other.
    """

    def __init__(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Begin with nothing warmed up.

        Args:
            inputs: a call's tensors in the Program's order, for the warm-up, which reads them;
                None: what `made_up_inputs` gives.
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
        work = functools.partial(
            self._capture_all,
            program,
            device,
            form=form,
            moving=moving_values(program),
            improve=improve,
            streamed=streamed,
        )
        return self._on_thread(device, work, "preparing a capture failed")

    def time_launches(self, program: Program, device: int) -> list[list[_native.AscendLaunchTime]]:
        """Launch everything as the warm-up does, on made-up inputs, between events of a timer.

        Leaves generators, inputs, weights and torch's settings as they were, also when it fails.

        Returns:
            By round what each launch took.

        Raises:
            BackendUnavailable: the runtime makes no events that tell times.
            CaptureError: a launch fails on such inputs (the message names it), or the caller is
                capturing.
            OutOfMemory: the device has no memory.
            ExecutionError: the device failed.
        """
        work = functools.partial(self._time_all, program, device)
        return self._on_thread(device, work, "preparing to time launches failed")

    def _on_thread(self, device: int, work: Callable[[Any], T], what: str) -> T:
        """What `work` gives on a thread of this capturer's, on a stream of torch's of its own.

        Args:
            device: where.
            work: is given the stream, which is the current one, behind the caller's.
            what: failed, in words, where torch_npu's streams, events and pools do.
        """
        npu: Any = torch.npu  # type: ignore[attr-defined]

        def alone(ready: Any) -> T:
            with _one_at_a_time, npu.device(device), torch.no_grad():
                stream = npu.Stream(device)
                with npu.stream(stream):
                    stream.wait_event(ready)
                    return work(stream)

        try:
            if npu.is_current_stream_capturing():
                raise CaptureError(
                    "a graph is being captured on the current stream: load the program before the "
                    "capture begins"
                )
            ready = npu.current_stream(device).record_event()
            return self._thread.submit(alone, ready).result()
        except OffloadError:
            raise
        except RuntimeError as error:
            raise failure_of_torch(error, what) from error

    def _time_all(
        self, program: Program, device: int, stream: Any
    ) -> list[list[_native.AscendLaunchTime]]:
        on_npu = torch.device("npu", device)
        inputs = self._inputs or input_tensors(program, made_up_inputs(program, 0))
        timer = _native.AscendLaunchTimer(device)
        rounds = []

        # Asking for the stream waits until all that was launched is on it.
        def launching(launch: Launch) -> None:
            timer.before(stream.npu_stream)

        def launched(launch: Launch) -> None:
            timer.after(stream.npu_stream)
            if launch is program.launches[-1]:  # before the warm-up waits for it
                rounds.append(timer.take())

        with own_random_states(generators_of(program, on_npu), on_npu):
            for _ in range(N_ROUNDS):
                warm_up(program, on_npu, inputs, launching=launching, launched=launched)
        return rounds

    def _capture_all(
        self,
        program: Program,
        device: int,
        stream: Any,
        *,
        form: str | None,
        moving: list[Moving],
        improve: Improve | None,
        streamed: StreamedWeights,
    ) -> CapturedModel:
        on_npu = torch.device("npu", device)
        generators = generators_of(program, on_npu)

        def capture(copied: Sequence[Moving]) -> CapturedModel:
            cells = CellFinder(on_npu, draws)
            one = _OneCapture(program, device, stream, form, copied, cells=cells, streamed=streamed)
            if improve is None:
                one.log.why_untold = "nobody compares captures"
            try:
                with own_random_states(generators, on_npu):  # of this capture alone
                    return one.run()
            except BaseException:
                cells.pools.clear()  # once the states of generators there have gone
                raise

        with own_random_states(generators, on_npu):
            draws = DrawLog(generators)
            warm_up(program, on_npu, self._inputs, launched=draws.note)
            give_back_unused()  # nothing is given back while something is captured
            model = capture(moving)
            return model if improve is None else improve(model, capture)


def give_back_unused() -> None:
    """Let torch give the device's memory back that it only keeps for later."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):  # while another thread captures
        npu.empty_cache()


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
        """Capture; what failed leaves nothing behind."""
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
        run = EagerRun(self._program, self._bases(), fill=None)
        self._tensors.append(run.bases)
        last_uses = last_uses_of(self._program)
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
                    run.bases.pop(value, None)  # its memory is for later launches
            self._set_places(run)
            self._copies.capture_out(self._handle)
            if self._model.steps is not None:
                self._model.steps.end(self._handle)
            self._end()
        except BaseException:
            abandon(self._graph, self._pool, self._handle, self._device.index)
            raise

    def _bases(self) -> Bases:
        """Weights where they are or are brought, host constants, memory of the pool for inputs."""
        bases: Bases = {}
        with self._pool_of_inputs.use():
            for value in self._program.values:
                if value.host_content is not None:
                    bases[value.index] = (host_storage(value.host_content), 0)
                elif value.index in self._streamed:
                    bases[value.index] = (self._streamed[value.index], 0)
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
            why = first_line(error) + refused_advice(error)
            raise ExecutionError(f"a capture cannot begin: {why}") from error

    def _before(self, launch: Launch) -> None:
        """Tell the streams what comes before a launch; from here on tasks are the launch's."""
        if self._model.steps is not None:
            self._model.steps.before(launch.index, self._handle)
        elif self.log.begins:  # nothing has come since the last moment
            self.log.begins[-1] = launch.index
            return
        self._note_tasks(launch.index)

    def _launch(self, run: EagerRun, launch: Launch) -> None:
        try:
            outcome = run.call(launch)()
            self._stream.npu_stream  # noqa: B018 - until it is launched, so that errors are its own
        except OffloadError as error:
            error.add_note(f"{launch.source}: {launch.operator}, in the capture")
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
        self._note_tasks(None)
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
            self.log.pool += [one for one in self._pieces() if one not in self.log.pool]

    def _pieces(self) -> list[tuple[int, int]]:
        """(address, bytes) of what launches have taken from the device, cells left out.

        In an order that does not depend on addresses, where one launch takes several at once.
        """
        segments = [*segments_of(self._pool, self._device), *self._cells.segments_of_launches()]
        segments.sort(key=lambda one: (one["total_size"], one["stream"]))
        return [(one["address"], one["total_size"]) for one in segments]

    def _note_tasks(self, begins: int | None) -> None:
        """A refused question leaves the capture as it is; nothing is asked any more then."""
        if self.log.why_untold:
            return
        try:
            counts = _native.ascend_count_tasks(self._device.index, self._model.handle)
        except (BackendUnavailable, ExecutionError) as error:
            self.log.why_untold = str(error)
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
