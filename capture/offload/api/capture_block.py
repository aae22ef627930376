"""The with-block of `capture`: one call of a model is watched and recorded as a Program."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeGuard

import torch

from offload.api.block_recording import BlockRecording, begin_call
from offload.api.captured import Captured
from offload.api.model_hooks import hooked
from offload.api.recording_turn import is_recording, refuse_nested
from offload.console.switches import debug_level
from offload.errors import CaptureError
from offload.files import find_stored_tensors
from offload.interpreter.outside_graphs import outside_graphs
from offload.program import StoredTensor
from offload.record import DynamicShapes, Recorder, is_called_again
from offload.record.freed_memory import give_back_freed

HOST_READS = ("avoid", "guard")


class CaptureBlock(contextlib.AbstractContextManager[Captured]):
    """The with-block of `capture`: returns the Captured, and checks that one call was recorded."""

    def __init__(
        self,
        model: Callable[..., Any],
        host_reads: str,
        weights: str | os.PathLike[str] | None,
        dynamic_shapes: DynamicShapes | None = None,
        *,
        training: bool = False,
    ) -> None:
        self._dynamic_shapes = dynamic_shapes
        self._training = training
        self._model = model
        self._host_reads = host_reads
        self._weights = weights
        self._recording: BlockRecording | None = None
        self._watching = contextlib.ExitStack()

    @outside_graphs
    def __enter__(self) -> Captured:
        if self._recording is not None:
            raise CaptureError(
                "the block of a capture can be entered only once: call offload.capture again"
            )
        dynamic_shapes = self._dynamic_shapes
        _check_may_vary(dynamic_shapes, self._host_reads, self._weights)
        if self._training:
            _check_may_train(dynamic_shapes, self._weights)
        stored = _stored_tensors(self._model, self._host_reads, self._weights)
        recording = BlockRecording(
            self._model,
            self._host_reads,
            stored,
            debug_level(),
            dynamic_shapes,
            training=self._training,
        )
        self._watching.enter_context(_watching(self._model, recording))
        self._recording, captured = recording, recording.captured
        captured._record = recording.record_call
        return captured

    @outside_graphs
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recording = self._recording
        assert recording is not None
        recording.captured._record = None
        self._watching.__exit__(kind, error, traceback)
        if error is not None and error is not recording.wrapper:
            recording.forget_failure()
            return
        del error, traceback  # its cause may be the error raised here, and have this frame
        recording.check_recorded(_how_to_call(self._model))
        give_back_freed(recording.captured.program)


def _stored_tensors(
    model: Callable[..., Any], host_reads: str, weights: str | os.PathLike[str] | None
) -> Mapping[str, StoredTensor] | None:
    """Check the arguments of `capture`; returns the tensors that the files of `weights` hold.

    Raises:
        CaptureError: the model, `host_reads` or their combination cannot be recorded; or a call is
            already being recorded.
        FileError: a file cannot be read.
    """
    if host_reads not in HOST_READS:
        raise CaptureError(f"host_reads: expected one of {HOST_READS}, got {host_reads!r}")
    if not callable(model):
        raise CaptureError(f"expected a module or a function, got a {type(model).__qualname__}")
    refuse_nested()
    if weights is not None and host_reads != "avoid":
        raise CaptureError(
            f"host_reads={host_reads!r}: nothing is computed while a model with weights= is "
            "recorded, so there are no values to read"
        )
    return None if weights is None else find_stored_tensors(weights)


def _check_may_vary(dynamic_shapes: DynamicShapes | None, host_reads: str, weights: object) -> None:
    """Refuse varying sizes together with options that are valid for one size only.

    Raises:
        CaptureError: host reads would be guards, or weights are in files.
    """
    if dynamic_shapes is None:
        return
    if host_reads != "avoid":
        raise CaptureError(
            f"host_reads={host_reads!r} and dynamic_shapes= exclude one another: what is read "
            "from a tensor is known only for the recorded sizes"
        )
    if weights is not None:
        raise CaptureError(
            "weights= and dynamic_shapes= exclude one another: a call whose sizes vary is "
            "compared with a computed call"
        )


def _check_may_train(dynamic_shapes: DynamicShapes | None, weights: object) -> None:
    """Refuse options that exclude recording a training step.

    Raises:
        CaptureError: gradients are disabled, sizes may vary, or weights are in files.
    """
    if weights is not None:
        raise CaptureError(
            "weights= and training=True exclude one another: a step writes the weights, which "
            "must be in memory"
        )
    if dynamic_shapes is not None:
        raise CaptureError(
            "dynamic_shapes= and training=True exclude one another: capture the step once for "
            "each shape of a batch"
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise CaptureError(
            "training=True: gradients are switched off here (torch.no_grad, "
            "torch.inference_mode), so a step would have none: capture outside of it"
        )


def _is_watchable(model: object) -> TypeGuard[torch.nn.Module]:
    """Whether hooks can watch the model's own call.

    Script modules accept none before the call. torch compiles the hooks of a module that was
    compiled in place (`model.compile()`) with it. A TransformerEncoderLayer with hooks leaves its
    fast path, which returns other values for a row of padding only.
    """
    unwatchable = (torch.jit.ScriptModule, torch.nn.TransformerEncoderLayer)
    if not isinstance(model, torch.nn.Module) or isinstance(model, unwatchable):
        return False
    return model._compiled_call_impl is None


def _how_to_call(model: Callable[..., Any]) -> str:
    """How to make a with-block's call so that it is recorded, in words."""
    if _is_watchable(model):
        return "model(x)"
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return "captured(x) (the model is scripted or traced by torch.jit, and takes no hooks)"
    return "captured(x) (the handle of `as captured`, as other calls of this one are not seen)"


@contextlib.contextmanager
def _watching(model: Callable[..., Any], recording: BlockRecording) -> Iterator[None]:
    """Record the module's own call in the block, by hooks around its forward."""
    if not _is_watchable(model):
        yield
        return
    watch = _Watch(recording)
    try:
        with hooked(model, watch.before, watch.after):
            yield
    finally:
        watch.end()


class _Watch:
    """The hooks of one with-block around one module's forward."""

    def __init__(self, recording: BlockRecording) -> None:
        self._recording = recording
        self._recorder: Recorder | None = None
        self._depth = 0
        self._handled: BaseException | None = None
        self._thread = threading.get_ident()

    @outside_graphs
    def before(self, module: Any, args: Any, kwargs: Any = None) -> Any:
        """Start recording, unless this call is inside a recorded one, or another thread's."""
        if is_called_again():
            return None
        if threading.get_ident() != self._thread:
            self._recording.called_elsewhere = True
            return None
        if self._recorder is not None:
            self._depth += 1
            return None
        if is_recording():
            return None  # it is called through the handle
        self._handled = sys.exc_info()[1]
        with self._recording.failure_kept():
            recorder = self._recording.start(args, kwargs)
            try:
                arguments = begin_call(recorder, module, args, kwargs)
            except BaseException as error:
                self._recording.abandon(recorder, error)
                raise
        self._recorder = recorder
        return arguments

    @outside_graphs
    def after(self, module: Any, args: Any, kwargs: Any, result: Any = None) -> Any:
        """End the recording; torch also calls this hook if the forward raised."""
        if threading.get_ident() != self._thread or self._recorder is None or is_called_again():
            return None
        if self._depth:
            self._depth -= 1
            return None
        recorder, self._recorder = self._recorder, None
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and error is not self._handled:
            self._recording.give_up(recorder, error)
            return None
        with self._recording.failure_kept():
            return self._recording.finish(recorder, result)

    def end(self) -> None:
        """Discard an unfinished recording: torch calls no hook after an interrupt."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            interrupted = CaptureError(
                "nothing was recorded: the call in the with-block was interrupted; make it again "
                "in another block"
            )
            self._recording.failure = self._recording.abandon(recorder, interrupted)
