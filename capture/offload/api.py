"""What a user calls to record: `offload.capture`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard, overload

import torch

from offload.captured import Captured
from offload.errors import CaptureError
from offload.files import find_stored_tensors, has_same_content
from offload.program import StoredTensor
from offload.record import (
    FakeWeights,
    Recorder,
    device_of_call,
    is_called_again,
    parameters_of,
    refuse_hidden_reads,
)
from offload.recorded_program import recorded_program, runs_opaque

HOST_READS = ("avoid", "guard")

_recording = threading.local()


def _refuse_nested() -> None:
    if getattr(_recording, "active", False):
        raise CaptureError(
            "a call is being recorded already: capture inside a captured call is not possible"
        )


class _OneRecording:
    """The recording of the one call of a with-block.

    Owner: the block.

    Attributes:
        captured: who gets the Program.
        refused: why the call was not recorded, if it was made and was not.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        host_reads: str,
        stored: Mapping[str, StoredTensor] | None,
    ) -> None:
        self.captured = Captured()
        self.refused = ""
        self._function = function
        self._host_reads = host_reads
        self._stored = stored
        self._fakes_given = contextlib.ExitStack()

    def record_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make and record a call through the handle.

        Raises:
            CaptureError: it cannot be recorded.
        """
        recorder = self.start(args, kwargs)
        try:
            args, kwargs = _begin(recorder, self._function, args, kwargs)
            result = self._function(*args, **kwargs)
        except BaseException as error:
            refusal = self.abandon(recorder)
            try:
                if refusal is not None and refusal is not error:
                    raise refusal from error  # an interpreter on the way has wrapped it
                raise
            finally:
                del refusal  # whose traceback has this frame
        return self.finish(recorder, result)

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder:
        """The recorder of a call that is about to be made.

        Raises:
            CaptureError: a call is being recorded, or was recorded, already; or this one cannot be.
        """
        _refuse_nested()
        if self.captured._program is not None:
            raise CaptureError(
                "the model was called twice in the with-block: one capture records one call; "
                "leave the block after the first, and call the captured model instead"
            )
        refuse_hidden_reads(self._function)
        fakes = None
        if self._stored is not None:
            fakes = FakeWeights(self._stored, device_of_call(args, kwargs), has_same_content)
            self._fakes_given.enter_context(fakes.given(self._function))
        try:
            recorder = Recorder(
                host_reads=self._host_reads,
                function=self._function,
                parameters=parameters_of(self._function),
                runs_opaque=runs_opaque,
                fakes=fakes,
            )
        except BaseException:
            self._fakes_given.close()
            raise
        _recording.active = True
        return recorder

    def abandon(self, recorder: Recorder) -> CaptureError | None:
        """Give up: the call raised. Gives what the recorder refused, if it raised because of it."""
        self._fakes_given.close()
        _recording.active = False
        refusal = recorder.abandon()
        self.refused = str(refusal or "the call in the with-block raised an error")
        return refusal

    def finish(self, recorder: Recorder, result: Any) -> Any:
        """End with what the call returned; gives the result to hand to the caller.

        Raises:
            CaptureError: what the call did cannot be done again.
        """
        try:
            with self._fakes_given:
                handed_out, recording = recorder.finish(result)
            self.captured._program = recorded_program(recorder, recording)
        finally:
            _recording.active = False
        return handed_out


class CaptureBlock(contextlib.AbstractContextManager[Captured]):
    """The with-block of `capture`: gives the Captured, and checks that one call was recorded."""

    def __init__(
        self, model: Callable[..., Any], host_reads: str, weights: str | os.PathLike[str] | None
    ) -> None:
        self._block = _recording_block(model, host_reads, weights)

    def __enter__(self) -> Captured:
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)


@overload
def capture(
    model: Callable[..., Any],
    /,
    *,
    host_reads: str = ...,
    weights: str | os.PathLike[str] | None = ...,
) -> CaptureBlock: ...


@overload
def capture(
    model: Callable[..., Any],
    /,
    *args: Any,
    host_reads: str = ...,
    weights: str | os.PathLike[str] | None = ...,
    **kwargs: Any,
) -> Captured: ...


def capture(
    model: Callable[..., Any],
    /,
    *args: Any,
    host_reads: str = "avoid",
    weights: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> CaptureBlock | Captured:
    """Record one call of `model`: this one, or without arguments the one made in the with-block.

    `captured = capture(model, x)` calls `model(x)` and records it; the call's result is
    `captured.recorded_result`.

    `with capture(model) as captured: y = model(x)` records a module's own call. A plain function
    cannot be watched, so it is called through the handle (`captured(x)` in the block), which works
    for modules too. The block is also the way for a model that takes no arguments, or one with a
    parameter named `host_reads` or `weights`.

    With `weights=` the call is recorded without computing it, under fake tensors on the device of
    the inputs: its weights are in files, and neither read nor held in memory, so the model may be
    larger than memory and built on the meta device. Its result has shapes and no content, and the
    Program is not checked by running it again.

    Args:
        model: an nn.Module, or any callable on tensors.
        *args: what to call it with; **kwargs likewise.
        host_reads: `avoid` tells model code that it is being compiled, so that it reads no tensor
            on the host, and refuses what still does; `guard` records the value that was read and
            checks it at each execution, before any state changes.
        weights: a safetensors file, or a folder of them, with the module's parameters and buffers
            by the names that they have in its `state_dict`, all of them. Other tensors that the
            model holds must be in memory, buffers that are not saved (persistent=False) too.
        **kwargs: see *args.

    Returns:
        With arguments the Captured, to be called with new tensors. Without, a context manager that
        gives it.

    Raises:
        CaptureError: the call cannot be recorded; a capture inside a captured call; or, at the
            block's end, that it made no call or two.
        FileError: the files of `weights` cannot be read, lack one of the model's tensors, or do not
            fit it.
    """
    block = CaptureBlock(model, host_reads, weights)
    if not (args or kwargs):
        return block
    with block as captured:
        captured._recorded_result = (captured(*args, **kwargs),)
    return captured


@contextlib.contextmanager
def _recording_block(
    model: Callable[..., Any], host_reads: str, weights: str | os.PathLike[str] | None
) -> Iterator[Captured]:
    if host_reads not in HOST_READS:
        raise CaptureError(f"host_reads: expected one of {HOST_READS}, got {host_reads!r}")
    if not callable(model):
        raise CaptureError(f"expected a module or a function, got a {type(model).__qualname__}")
    _refuse_nested()
    if weights is not None and host_reads != "avoid":
        raise CaptureError(
            f"host_reads={host_reads!r}: nothing is computed while a model with weights= is "
            "recorded, so there are no values to read"
        )
    stored = None if weights is None else find_stored_tensors(weights)
    recording = _OneRecording(model, host_reads, stored)
    captured = recording.captured
    captured._record = recording.record_call
    with _watching(model, recording):
        try:
            yield captured
        finally:
            captured._record = None
    if captured._program is not None:
        return
    if recording.refused:
        raise CaptureError(recording.refused)
    how = "model(x)" if _is_watchable(model) else "captured(x)"
    raise CaptureError(f"nothing was called in the with-block: call {how} there exactly once")


def _is_watchable(model: object) -> TypeGuard[torch.nn.Module]:
    """Whether hooks can watch the model's own call.

    Script modules take none before the call; torch compiles the hooks of a module that was compiled
    in place (`model.compile()`) with it; and a TransformerEncoderLayer that has any leaves its
    fast path, which gives other values for a row that is padded altogether.
    """
    unwatchable = (torch.jit.ScriptModule, torch.nn.TransformerEncoderLayer)
    if not isinstance(model, torch.nn.Module) or isinstance(model, unwatchable):
        return False
    return model._compiled_call_impl is None


@contextlib.contextmanager
def _watching(model: Callable[..., Any], recording: _OneRecording) -> Iterator[None]:
    """Record the module's own call in the block, by hooks around its forward."""
    if not _is_watchable(model):
        yield
        return
    watch = _Watch(recording)
    hooks = [
        model.register_forward_pre_hook(watch.before, prepend=True, with_kwargs=True),
        model.register_forward_hook(watch.after, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        watch.end()


class _Watch:
    """The hooks of one with-block around one module's forward."""

    def __init__(self, recording: _OneRecording) -> None:
        self._recording = recording
        self._recorder: Recorder | None = None
        self._depth = 0
        self._handled: BaseException | None = None

    def before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Start recording, unless this call is inside a recorded one."""
        if is_called_again():
            return None
        if self._recorder is not None:
            self._depth += 1
            return None
        if getattr(_recording, "active", False):
            return None  # it is called through the handle
        recorder = self._recording.start(args, kwargs)
        self._handled = sys.exc_info()[1]
        try:
            arguments = _begin(recorder, module, args, kwargs)
        except BaseException:
            self._recording.abandon(recorder)
            raise
        self._recorder = recorder
        return arguments

    def after(self, module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """End the recording; torch calls this hook when the forward raised as well."""
        if self._recorder is None or is_called_again():
            return None
        if self._depth:
            self._depth -= 1
            return None
        recorder, self._recorder = self._recorder, None
        if sys.exc_info()[1] is not self._handled:
            self._recording.abandon(recorder)
            return None
        return self._recording.finish(recorder, result)

    def end(self) -> None:
        """Drop a recording that never came to its end."""
        if self._recorder is not None:
            self._recording.abandon(self._recorder)
            self._recorder = None


# What a call of an executable takes for itself.
_RESERVED = ("out", "feature_map")


def _begin(
    recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Begin the recording, unless the call gives a name that executions take for themselves.

    Raises:
        CaptureError: it does; or an argument cannot be recorded.
    """
    for name in (*parameters_of(function).positional[: len(args)], *kwargs):
        if name in _RESERVED:
            raise CaptureError(
                f"the call gives the model's parameter {name!r}, a keyword by which an execution "
                "takes buffers of its own: rename the parameter, or capture a function that calls "
                "the model and names it otherwise"
            )
    return recorder.begin(args, kwargs)
