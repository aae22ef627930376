"""Captures a Program's launches with torch_npu, into a model on memory of separate pools."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from offload.backends.ascend.captured_model import CapturedModel, Improve, moving_values
from offload.backends.ascend.launch_times import N_ROUNDS
from offload.backends.ascend.one_capture import OneCapture
from offload.backends.ascend.random_cells import CellFinder
from offload.backends.ascend.streaming import StreamedWeights
from offload.backends.captured.capture_thread import refuse_capturing, run_on_capture_thread
from offload.backends.captured.copied_values import CopiedValue
from offload.backends.captured.random_draws import DrawLog, generators_of, own_random_states
from offload.backends.captured.torch_warm_up import warm_up
from offload.errors import CaptureError, OffloadError
from offload.interpreter.device_failures import failure_of_torch
from offload.interpreter.made_up_inputs import input_tensors, made_up_inputs
from offload.native import _native
from offload.program import BoundProgram, Launch

NONE_STREAMED = StreamedWeights()

T = TypeVar("T")

# ACL_ERROR_RT_STREAM_CAPTURED of aclrtSynchronizeDevice (hicann/runtime, context.cc).
_STREAM_CAPTURED = "107027"


class TorchCapturer:
    """Captures with torch_npu; each Program is warmed up once.

    Owner: one preparation of a Program. Thread: any, one call at a time; captures of several
    capturers wait for each other.
    """

    def __init__(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Begin without a warm-up.

        Args:
            inputs: a call's tensors in the Program's order, for the warm-up, which reads them;
                None: the result of `made_up_inputs`.
        """
        self._inputs = inputs

    def capture(
        self,
        bound: BoundProgram,
        device: int,
        form: str | None,
        *,
        improve: Improve | None = None,
        streamed: StreamedWeights = NONE_STREAMED,
    ) -> CapturedModel:
        """Run every launch twice: as warm-up, and under capture, where nothing executes.

        Generators, inputs, weights and torch's settings stay unchanged, even on failure.

        Args:
            bound: its launches, in order.
            device: its index.
            form: what copies moving tensors, `captured` or `enqueued`; None: what the runtime
                supports.
            improve: makes a better model by more captures, or returns the given one.
            streamed: where weights from files lie, and their copies, which are captured between
                launches; a launch is a node of its steps.

        Raises:
            CaptureError: a launch cannot be captured (the message names it), an input cannot be
                copied, or the caller is capturing; or what `improve` raises.
            BackendUnavailable: the runtime captures no copies, and they were requested.
            OutOfMemory: the device has no memory.
            ExecutionError: the device failed.
        """
        program = bound.program
        work = functools.partial(
            self._capture_all,
            bound,
            device,
            form=form,
            moving=moving_values(program),
            improve=improve,
            streamed=streamed,
        )
        return self._on_thread(device, work, "preparing a capture failed")

    def time_launches(
        self, bound: BoundProgram, device: int
    ) -> list[list[_native.AscendLaunchTime]]:
        """Run all launches as in the warm-up, on made-up inputs, between events of a timer.

        Generators, inputs, weights and torch's settings stay unchanged, even on failure.

        Returns:
            The duration of each launch, by round.

        Raises:
            BackendUnavailable: the runtime has no timing events.
            CaptureError: a launch fails on such inputs (the message names it), or the caller is
                capturing.
            OutOfMemory: the device has no memory.
            ExecutionError: the device failed.
        """
        work = functools.partial(self._time_all, bound, device)
        return self._on_thread(device, work, "preparing to time launches failed")

    def _on_thread(self, device: int, work: Callable[[Any], T], what: str) -> T:
        """Return the result of `work` on the capture thread, on a separate stream of torch.

        Args:
            device: its index.
            work: receives the stream, which is current, behind the caller's stream.
            what: what failed, in words, where torch_npu's streams, events and pools fail.
        """
        npu: Any = torch.npu  # type: ignore[attr-defined]

        def alone(ready: Any) -> T:
            _refuse_other_captures(device)  # no capture of offload's own is under way here
            with npu.device(device), torch.no_grad():
                stream = npu.Stream(device)
                with npu.stream(stream):
                    stream.wait_event(ready)
                    return work(stream)

        try:
            refuse_capturing("npu")
            ready = npu.current_stream(device).record_event()
            return run_on_capture_thread(functools.partial(alone, ready), "npu")
        except OffloadError:
            raise
        except RuntimeError as error:
            raise failure_of_torch(error, what) from error

    def _time_all(
        self, bound: BoundProgram, device: int, stream: Any
    ) -> list[list[_native.AscendLaunchTime]]:
        program = bound.program
        on_npu = torch.device("npu", device)
        inputs = self._inputs or input_tensors(bound, made_up_inputs(bound, 0))
        timer = _native.AscendLaunchTimer(device)
        rounds = []

        # Asking for the stream waits until every launch is on it.
        def launching(launch: Launch) -> None:
            timer.before(stream.npu_stream)

        def launched(launch: Launch) -> None:
            timer.after(stream.npu_stream)
            if launch is program.launches[-1]:  # before the warm-up waits for it
                rounds.append(timer.take())

        with own_random_states(generators_of(bound, on_npu), on_npu):
            for _ in range(N_ROUNDS):
                warm_up(bound, on_npu, inputs, launching=launching, launched=launched)
        return rounds

    def _capture_all(
        self,
        bound: BoundProgram,
        device: int,
        stream: Any,
        *,
        form: str | None,
        moving: list[CopiedValue],
        improve: Improve | None,
        streamed: StreamedWeights,
    ) -> CapturedModel:
        on_npu = torch.device("npu", device)
        generators = generators_of(bound, on_npu)

        def capture(copied: Sequence[CopiedValue]) -> CapturedModel:
            cells = CellFinder(on_npu, draws)
            one = OneCapture(bound, device, stream, form, copied, cells=cells, streamed=streamed)
            if improve is None:
                one.log.why_unreported = "captures are not compared"
            try:
                with own_random_states(generators, on_npu):  # of this capture only
                    return one.run()
            except BaseException:
                cells.pools.clear()  # after the states of generators there are destroyed
                raise

        with own_random_states(generators, on_npu):
            draws = DrawLog(generators)
            warm_up(bound, on_npu, self._inputs, launched=draws.note)
            give_back_unused()  # nothing is freed during a capture
            model = capture(moving)
            return model if improve is None else improve(model, capture)


def _refuse_other_captures(device: int) -> None:
    """Refuse to begin while a stream of the device is captured that is not the current one.

    torch_npu synchronizes the device wherever it destroys a pool or a graph, which the runtime
    refuses while any of its streams is captured.

    Raises:
        CaptureError: another stream is being captured, by this thread or another.
        RuntimeError: the device failed.
    """
    npu: Any = torch.npu  # type: ignore[attr-defined]
    try:
        npu.synchronize(device)
    except RuntimeError as error:
        if _STREAM_CAPTURED not in str(error):
            raise
        raise CaptureError(
            f"a graph is being captured on another stream of npu:{device}: load the program before "
            "that capture begins, or after it has ended"
        ) from None


def give_back_unused() -> None:
    """Make torch free its cached device memory."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):  # another thread is capturing
        npu.empty_cache()
