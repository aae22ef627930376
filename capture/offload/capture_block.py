"""The with-block of `capture`: one call of a model is watched, recorded and made a Program."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeGuard

import torch

from offload.captured import Captured
from offload.errors import CaptureError, OffloadError
from offload.files import find_stored_tensors, has_same_content
from offload.host_memory import give_back_freed
from offload.program import StoredTensor
from offload.record import (
    FakeWeights,
    Recorder,
    device_of_call,
    is_called_again,
    parameters_of,
    refuse_fake_mode,
    refuse_hidden_reads,
)
from offload.recorded_program import recorded_program, runs_opaque

# What a call of an executable takes for itself.
_RESERVED = ("out", "feature_map")
HOST_READS = ("avoid", "guard")

_recording = threading.local()


def _refuse_nested() -> None:
    if getattr(_recording, "active", False):
        raise CaptureError(
            "a call is being recorded already: capture inside a captured call is not possible"
        )


def _raise_as_it_was(error: BaseException) -> NoReturn:
    """Raise again what was raised before: its cause, its context and its notes stay."""
    context = error.__context__
    try:
        raise error
    except BaseException:
        error.__context__ = context
        raise
    finally:
        del error, context  # the traceback has this frame


class _OneRecording:
    """The recording of the one call of a with-block.

    Owner: the block.

    Attributes:
        captured: who gets the Program.
        failure: why the call was not recorded, if it was made and was not. Its traceback leads
            here, so that the block forgets it at its end.
        wrapper: what the model's code raised instead of it, if that is another error.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        host_reads: str,
        stored: Mapping[str, StoredTensor] | None,
    ) -> None:
        self.captured = Captured()
        self.failure: BaseException | None = None
        self.wrapper: BaseException | None = None
        self._function = function
        self._host_reads = host_reads
        self._stored = stored
        self._fakes_given = contextlib.ExitStack()

    def record_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make and record a call through the handle.

        Raises:
            CaptureError: it cannot be recorded.
            OffloadError: another one of what making or checking the Program raises; or whatever
                the call raises.
        """
        with self.failure_kept():
            recorder = self.start(args, kwargs)
            try:
                args, kwargs = _begin(recorder, self._function, args, kwargs)
                result = self._function(*args, **kwargs)
            except BaseException as error:
                failure = self.abandon(recorder, error)
                try:
                    if failure is not error:  # an interpreter on the way has wrapped it
                        _raise_as_it_was(failure)
                    raise
                finally:
                    del failure  # whose traceback has this frame
            return self.finish(recorder, result)

    @contextlib.contextmanager
    def failure_kept(self) -> Iterator[None]:
        """Keep what a call raises: code of the block that catches it has recorded nothing."""
        self.failure = self.wrapper = None
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise

    def check_recorded(self, how: str) -> None:
        """At the block's end: one call was recorded.

        Args:
            how: to call the model, in words.

        Raises:
            CaptureError: no call was made; or the one that was made raised an error that is not
                offload's, which is its cause.
            OffloadError: what the call raised, itself.
        """
        failure = self.forget_failure()
        try:
            if self.captured._program is not None:
                return
            if failure is None:
                raise CaptureError(
                    f"nothing was called in the with-block: call {how} there exactly once"
                )
            if isinstance(failure, OffloadError):
                _raise_as_it_was(failure)
            raise CaptureError(
                "nothing was recorded: the call in the with-block raised "
                f"{type(failure).__qualname__}: {failure}"
            ) from failure
        finally:
            del failure

    def forget_failure(self) -> BaseException | None:
        """Why the call was not recorded, which is not kept."""
        failure, self.failure, self.wrapper = self.failure, None, None
        return failure

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
        refuse_fake_mode()
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

    def abandon(self, recorder: Recorder, error: BaseException) -> BaseException:
        """Give up: the call raised an error. Gives what to raise: what was refused, if it was."""
        self._fakes_given.close()
        _recording.active = False
        refusal = recorder.abandon()
        if refusal is None or refusal is error or not isinstance(error, Exception):
            return error
        refusal.add_note(f"the call went on to raise {type(error).__qualname__}: {error}")
        return refusal

    def give_up(self, recorder: Recorder, error: Exception) -> None:
        """Abandon a call that raises on, whatever is raised here; the block's end raises it."""
        self.failure = self.abandon(recorder, error)
        if self.failure is not error:
            self.wrapper = error

    def finish(self, recorder: Recorder, result: Any) -> Any:
        """End with what the call returned; gives the result to hand to the caller.

        Raises:
            CaptureError: what the call did cannot be done again.
            ExecutionError: the device failed while that was checked.
        """
        try:
            with self._fakes_given:
                handed_out, recording = recorder.finish(result)
            self.captured._program = recorded_program(recorder, recording)
        finally:
            _recording.active = False
        return handed_out


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


# ---- the block -----------------------------------------------------------------------------------


class CaptureBlock(contextlib.AbstractContextManager[Captured]):
    """The with-block of `capture`: gives the Captured, and checks that one call was recorded."""

    def __init__(
        self, model: Callable[..., Any], host_reads: str, weights: str | os.PathLike[str] | None
    ) -> None:
        self._model = model
        self._host_reads = host_reads
        self._weights = weights
        self._recording: _OneRecording | None = None
        self._watching = contextlib.ExitStack()

    def __enter__(self) -> Captured:
        if self._recording is not None:
            raise CaptureError("the block of a capture is entered once: call offload.capture again")
        stored = _stored_tensors(self._model, self._host_reads, self._weights)
        recording = _OneRecording(self._model, self._host_reads, stored)
        self._watching.enter_context(_watching(self._model, recording))
        self._recording, captured = recording, recording.captured
        captured._record = recording.record_call
        return captured

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
        del error, traceback  # whose cause may be what is raised here, and have this frame
        recording.check_recorded(_how_to_call(self._model))
        give_back_freed(recording.captured.program)


def _stored_tensors(
    model: Callable[..., Any], host_reads: str, weights: str | os.PathLike[str] | None
) -> Mapping[str, StoredTensor] | None:
    """Check what `capture` was given; the tensors that the files of `weights` hold.

    Raises:
        CaptureError: the model, `host_reads` or both together are none that can be recorded; or a
            call is being recorded already.
        FileError: a file cannot be read.
    """
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
    return None if weights is None else find_stored_tensors(weights)


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


def _how_to_call(model: Callable[..., Any]) -> str:
    """How a with-block's call is made so that it is recorded, in words."""
    if _is_watchable(model):
        return "model(x)"
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return "captured(x) (the model is scripted or traced by torch.jit, and takes no hooks)"
    return "captured(x)"


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
        self._handled = sys.exc_info()[1]
        with self._recording.failure_kept():
            recorder = self._recording.start(args, kwargs)
            try:
                arguments = _begin(recorder, module, args, kwargs)
            except BaseException as error:
                self._recording.abandon(recorder, error)
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
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and error is not self._handled:
            self._recording.give_up(recorder, error)
            return None
        with self._recording.failure_kept():
            return self._recording.finish(recorder, result)

    def end(self) -> None:
        """Drop a recording that never came to its end: torch calls no hook after an interrupt."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            interrupted = CaptureError(
                "nothing was recorded: the call in the with-block was interrupted; make it again "
                "in another block"
            )
            self._recording.failure = self._recording.abandon(recorder, interrupted)
