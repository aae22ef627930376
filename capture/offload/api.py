"""What a user calls: `offload.capture`, and the Captured that it gives."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard, overload

import torch

from offload.errors import CaptureError
from offload.explain import explain
from offload.files import find_stored_tensors, open_program, save_program
from offload.load import load_program
from offload.program import Program, StoredTensor
from offload.record import (
    FakeWeights,
    Recorder,
    device_of_call,
    parameters_of,
    refuse_hidden_reads,
)
from offload.recorded_program import recorded_program, runs_opaque
from offload.replay import Executable
from offload.timeline import Scheduling

HOST_READS = ("avoid", "guard")

_recording = threading.local()


class Captured:
    """A model's recorded call. Call it with new tensors to execute.

    Attributes:
        program: the recorded Program; None until the call in the with-block is done.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        host_reads: str = "avoid",
        program: Program | None = None,
        stored: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        self._function = function
        self._stored = stored
        self._fakes_given = contextlib.ExitStack()
        self._host_reads = host_reads
        self._program = program
        self._in_block = False
        self._is_finishing = False
        self._refused: Exception | None = None
        self._recorded_result: tuple[Any] | None = None
        self._default: Executable | None = None
        self._load_lock = threading.Lock()

    @property
    def program(self) -> Program:
        """The recorded Program.

        Raises:
            CaptureError: nothing has been recorded yet.
        """
        if self._program is None:
            raise CaptureError("nothing is recorded yet: call the model once inside the with-block")
        return self._program

    @property
    def recorded_result(self) -> Any:
        """What the recorded call returned; kept alive by this object.

        Raises:
            CaptureError: the call was made in a with-block, which returned its result there, or
                the Program was opened from a file.
        """
        if self._recorded_result is None:
            raise CaptureError(
                "only capture(model, *args) keeps the recorded call's result: in a with-block, "
                "keep what the call returns"
            )
        return self._recorded_result[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute with new tensors; in the with-block, call the model and record it.

        Takes what the model took and returns what it returned, nested alike.

        Raises:
            CaptureError: the call cannot be recorded.
            BindingError: an argument does not fit the recorded call; nothing has run.
            ExecutionError: a launch failed.
        """
        if self._default is not None:
            return self._default(*args, **kwargs)
        if self._in_block:
            return self._record_call(args, kwargs)
        return self._loaded()(*args, **kwargs)

    def _loaded(self) -> Executable:
        with self._load_lock:
            if self._default is None:
                self._default = self.load()
            return self._default

    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, in calls of this object.

        Raises:
            BindingError: a new storage is laid out otherwise than the recorded one.
        """
        if self._default is not None:
            self._default.rebind_weights()

    def load(
        self,
        device: str | torch.device | None = None,
        *,
        scheduling: str = Scheduling.OFFLOAD,
        verify: bool = True,
        weights_budget: int | str | None = None,
    ) -> Executable:
        """Make the Program resident on a device.

        Args:
            device: device type, which may have an index (`cuda:1`); by default what the Program
                was recorded on, or to which its file was read.
            scheduling: `offload` delivers the program as one task; `host` launch by launch, the
                baseline that it is compared with.
            verify: prove at load that a captured graph computes the same at other addresses. The
                cpu backend proves each launch when it is first executed, whatever is said here.
            weights_budget: all memory of the device that weights may use: bytes, text such as
                `2GiB`, or `auto` for what is free. What does not fit is brought from the files of
                `capture(weights=)`, or on the CPU from the model's own tensors, while launches
                run. None: weights are used where they are; those in files are all read.

        Raises:
            BackendUnavailable: there is no such device here, it cannot run this Program, or the
                Program's weights and inputs are on another one of its type.
            CaptureError: the device cannot capture the Program, or the proof failed.
            BindingError: there is no such scheduling; or a weight has another shape, dtype or
                layout than when it was recorded.
            PlanError: the Program cannot be placed, or the budget is too small: the message says
                what is needed, and what sets it.
            FileError: a weight's file is gone, or shorter than it was.
        """
        return load_program(
            self.program,
            device,
            scheduling=scheduling,
            verify=verify,
            weights_budget=weights_budget,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Program and its weights to one file; `offload.open` reads it without pickle.

        Raises:
            CaptureError: nothing has been recorded yet.
            FileError: something in the program cannot be written, or the path cannot be written to.
        """
        save_program(self.program, path)

    def explain(self) -> str:
        """Say what a user should know: launches without an out-variant, copies, reads avoided.

        Loads the Program if it is not loaded. Which out-variants failed their proof, and the bytes
        outside the arena, are known after the first execution.
        """
        return explain(self._loaded())

    # ---- recording ---------------------------------------------------------------------------

    def _record_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call made through the handle."""
        assert self._function is not None
        recorder = self._start(args, kwargs)
        try:
            args, kwargs = _begin(recorder, self._function, args, kwargs)
            result = self._function(*args, **kwargs)
        except BaseException as error:
            refusal = self._abandon(recorder)
            if refusal is not None and refusal is not error:
                raise refusal from error  # an interpreter on the way has wrapped it
            raise
        return self._finish(recorder, result)

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder:
        _refuse_nested()
        if self._program is not None:
            raise CaptureError(
                "the model was called twice in the with-block: one capture records one call; "
                "leave the block after the first, and call the captured model instead"
            )
        function = self._function
        assert function is not None
        refuse_hidden_reads(function)
        fakes = None
        if self._stored is not None:
            fakes = FakeWeights(self._stored, device_of_call(args, kwargs))
            self._fakes_given.enter_context(fakes.given(function))
        try:
            recorder = Recorder(
                host_reads=self._host_reads,
                function=function,
                parameters=parameters_of(function),
                runs_opaque=runs_opaque,
                fakes=fakes,
            )
        except BaseException:
            self._fakes_given.close()
            raise
        _recording.active = True
        return recorder

    def _abandon(self, recorder: Recorder) -> CaptureError | None:
        self._fakes_given.close()
        _recording.active = False
        refusal = recorder.abandon()
        self._refused = refusal or CaptureError("the call in the with-block raised an error")
        return refusal

    def _finish(self, recorder: Recorder, result: Any) -> Any:
        self._is_finishing = True  # the callable may run again, on any thread
        try:
            with self._fakes_given:
                handed_out, recording = recorder.finish(result)
            self._program = recorded_program(recorder, recording)
        finally:
            self._is_finishing = False
            _recording.active = False
        return handed_out


def _refuse_nested() -> None:
    if getattr(_recording, "active", False):
        raise CaptureError(
            "a call is being recorded already: capture inside a captured call is not possible"
        )


def open_file(path: str | os.PathLike[str]) -> Captured:
    """Open a saved Program; the model's code is not needed, and nothing is executed.

    Raises:
        FileError: the file is missing, truncated, corrupted, newer than this version, or asks for
            an operator that is not on the list of safe ones.
    """
    return Captured(None, program=open_program(path))


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
            by the names that they have in its `state_dict`. What is not there must be in memory.
        **kwargs: see *args.

    Returns:
        With arguments the Captured, to be called with new tensors. Without, a context manager that
        gives it.

    Raises:
        CaptureError: the call cannot be recorded; a capture inside a captured call; or, at the
            block's end, that it made no call or two.
        FileError: the files of `weights` cannot be read, or do not fit the model.
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
    captured = Captured(model, host_reads, stored=stored)
    captured._in_block = True
    with _watching(model, captured):
        try:
            yield captured
        finally:
            captured._in_block = False
            captured._function = None
    if captured._program is None and captured._refused is not None:
        raise captured._refused
    if captured._program is None:
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
def _watching(model: Callable[..., Any], captured: Captured) -> Iterator[None]:
    """Record the module's own call in the block, by hooks around its forward."""
    if not _is_watchable(model):
        yield
        return
    watch = _Watch(captured)
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

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._recorder: Recorder | None = None
        self._depth = 0
        self._handled: BaseException | None = None

    def before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Start recording, unless this call is inside a recorded one."""
        if self._captured._is_finishing:
            return None
        if self._recorder is not None:
            self._depth += 1
            return None
        if getattr(_recording, "active", False):
            return None  # it is called through the handle
        recorder = self._captured._start(args, kwargs)
        self._handled = sys.exc_info()[1]
        try:
            arguments = _begin(recorder, module, args, kwargs)
        except BaseException:
            self._captured._abandon(recorder)
            raise
        self._recorder = recorder
        return arguments

    def after(self, module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """End the recording; torch calls this hook when the forward raised as well."""
        if self._recorder is None or self._captured._is_finishing:
            return None
        if self._depth:
            self._depth -= 1
            return None
        recorder, self._recorder = self._recorder, None
        if sys.exc_info()[1] is not self._handled:
            self._captured._abandon(recorder)
            return None
        return self._captured._finish(recorder, result)

    def end(self) -> None:
        """Drop a recording that never came to its end."""
        if self._recorder is not None:
            self._captured._abandon(self._recorder)
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
