"""Records the one call of a with-block, from its arguments to its Program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from offload.api.captured import Captured
from offload.api.compiling_call import recorded_as_compiling
from offload.api.next_step import NextStep, guarded
from offload.api.recorded_program import recorded_program, runs_opaque, triton_compiler
from offload.api.recording_turn import TURN, refuse_nested
from offload.console.progress import reporting, stage
from offload.console.switches import DebugLevel, say
from offload.console.user_code import callable_name, user_lines, user_location
from offload.distributed import Rendezvous, is_one_of_several
from offload.errors import CaptureError, OffloadError
from offload.files import has_same_content
from offload.program import BoundProgram, StoredTensor
from offload.record import (
    DynamicShapes,
    FakeWeights,
    PlainCall,
    Recorder,
    SizedFunctions,
    VaryingSizes,
    WholeLayers,
    WholeProgram,
    device_of_call,
    parameters_of,
    refuse_hidden_reads,
    refuse_transforms,
    varying_sizes,
)
from offload.run.debug_lines import program_line

# Keywords of an executable's call.
_RESERVED = ("out", "feature_map")


def raise_as_it_was(error: BaseException) -> NoReturn:
    """Raise an error again with its cause, its context and its notes unchanged."""
    context = error.__context__
    try:
        raise error
    except BaseException:
        error.__context__ = context
        raise
    finally:
        del error, context  # the traceback has this frame


class BlockRecording:
    """The recording of the one call of a with-block.

    Owner: the block.

    Attributes:
        captured: receives the Program.
        failure: why a call was not recorded. Its traceback leads here, so the block drops it at its
            end.
        wrapper: the error that the model's code raised instead of it, if any.
        called_elsewhere: another thread called the model meanwhile, unrecorded.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        host_reads: str,
        stored: Mapping[str, StoredTensor] | None,
        level: DebugLevel,
        dynamic_shapes: DynamicShapes | None = None,
        *,
        training: bool = False,
    ) -> None:
        self._training = training
        self.captured = Captured(name=callable_name(function))
        self.failure: BaseException | None = None
        self.wrapper: BaseException | None = None
        self.called_elsewhere = False
        self._function = function
        self._host_reads = host_reads
        self._stored = stored
        self._level = level
        self._dynamic_shapes = dynamic_shapes
        self._varying: VaryingSizes | None = None
        self._fakes_given = contextlib.ExitStack()
        self._progress = contextlib.ExitStack()
        self._called: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._rendezvous: Rendezvous | None = None

    def record_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make and record a call through the handle.

        Raises:
            CaptureError: it cannot be recorded.
            OffloadError: another error of making or checking the Program; or whatever the call
                raises.
        """
        with self.failure_kept():
            recorder = self.start(args, kwargs)
            try:
                args, kwargs = begin_call(recorder, self._function, args, kwargs)
                result = self._function(*args, **kwargs)
            except BaseException as error:
                failure = self.abandon(recorder, error)
                try:
                    if failure is not error:  # an interpreter in between has wrapped it
                        raise_as_it_was(failure)
                    raise
                finally:
                    del failure  # its traceback has this frame
            return self.finish(recorder, result)

    @contextlib.contextmanager
    def failure_kept(self) -> Iterator[None]:
        """Keep the error of a call: code of the block that catches it has recorded nothing."""
        self.failure = self.wrapper = None
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise

    def check_recorded(self, how: str) -> None:
        """At the end of the block, check that one call was recorded.

        Args:
            how: how to call the model, in words.

        Raises:
            CaptureError: no call was made; or the call raised an error that is not offload's, which
                becomes the cause.
            OffloadError: the call's own error.
        """
        failure = self.forget_failure()
        try:
            if self.captured._bound is not None:
                return
            if failure is None:
                elsewhere = "; another thread called it, and such calls are not recorded"
                raise CaptureError(
                    f"nothing was called in the with-block: call {how} there exactly once, on the "
                    f"block's own thread{elsewhere * self.called_elsewhere}"
                )
            if isinstance(failure, OffloadError):
                raise_as_it_was(failure)
            raise CaptureError(
                "nothing was recorded: the call in the with-block raised "
                f"{type(failure).__qualname__}: {failure}"
            ) from failure
        finally:
            del failure

    def forget_failure(self) -> BaseException | None:
        """Return why the call was not recorded, and drop it."""
        failure, self.failure, self.wrapper = self.failure, None, None
        return failure

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder:
        """The recorder of a call that is about to be made.

        Raises:
            CaptureError: a call is being recorded, or was already recorded; or this call cannot be.
        """
        if is_one_of_several():
            name = callable_name(self._function)
            self._rendezvous = Rendezvous("capture", name, lines=user_lines())
        try:
            refuse_nested()
            refuse_hidden_reads(self._function)
            refuse_transforms()
        except CaptureError as error:
            self._refuse(error)
            raise
        TURN.take()
        try:
            if self.captured._bound is not None:
                raise CaptureError(
                    "the model was called twice in the with-block: one capture records one call; "
                    "leave the block after the first, and call the captured model instead"
                )
            self._called = (args, kwargs)
            if self._dynamic_shapes is not None:
                self._varying = varying_sizes(self._function, self._dynamic_shapes, args, kwargs)
            self._progress.enter_context(reporting())
            self._progress.enter_context(stage("recording launches"))
            if self._stored is None:
                return self._recorder()
            fakes = FakeWeights(self._stored, device_of_call(args, kwargs), has_same_content)
            self._fakes_given.enter_context(fakes.given(self._function))
            return self._recorder(fakes=fakes, avoided_read=self._read_on_trial(fakes))
        except BaseException as error:
            self._refuse(error)
            self._leave()
            raise

    def _refuse(self, error: BaseException) -> None:
        """Tell other ranks that this rank stops recording."""
        if self._rendezvous is not None:
            self._rendezvous.refuse(f"{type(error).__qualname__}: {error}")

    def _agree(self, what: str) -> None:
        """Wait for the ranks that this call has met to reach the same point."""
        if self._rendezvous is not None:
            self._rendezvous.agree(what)

    def _read_on_trial(self, fakes: FakeWeights) -> str:
        """The host read that the call may avoid with `is_compiling()` true; empty: it makes none.

        Under fake tensors there is nothing to read, and an error of the forward ends the call.
        Nothing is computed, so the call is tried first.
        """
        recorder = self._recorder(fakes=fakes)
        try:
            recorder.call_again(*self._called)
        except Exception:
            return recorder.avoided_read
        recorder.abandon()
        return ""

    def _recorder(
        self,
        *,
        fakes: FakeWeights | None = None,
        plain: PlainCall | None = None,
        avoided_read: str = "",
    ) -> Recorder:
        is_varying = self._varying is not None
        sized = SizedFunctions(WholeLayers()) if is_varying else None
        return Recorder(
            host_reads=self._host_reads,
            function=self._function,
            parameters=parameters_of(self._function),
            runs_opaque=(lambda _: False) if self._training else runs_opaque,
            fakes=fakes,
            plain=plain,
            avoided_read=avoided_read,
            keeps_seen=is_varying,
            trains=self._training,
            rendezvous=self._rendezvous,
            sized=sized,
            triton_compiler=triton_compiler,
        )

    def _leave(self) -> None:
        try:
            self._fakes_given.close()
        finally:
            self._progress.close()
            self._called = ((), {})
            TURN.give_back()

    def abandon(self, recorder: Recorder, error: BaseException) -> BaseException:
        """Discard the recording of a call that raised; return the refusal, if any, or the error."""
        try:
            refusal = recorder.abandon()
            self._refuse(refusal or error)
        finally:
            self._leave()
        if refusal is None or refusal is error or not isinstance(error, Exception):
            return error
        refusal.add_note(f"the call went on to raise {type(error).__qualname__}: {error}")
        return refusal

    def give_up(self, recorder: Recorder, error: Exception) -> None:
        """Discard a call whose own error propagates; the end of the block raises the failure."""
        self.failure = self.abandon(recorder, error)
        if self.failure is not error:
            self.wrapper = error

    def finish(self, recorder: Recorder, result: Any) -> Any:
        """Finish with the call's result; returns the result for the caller.

        Raises:
            CaptureError: what the call did cannot be repeated.
            ExecutionError: the device failed during the check.
        """
        try:
            handed_out = self._finish(recorder, result)
            self._agree("the recorded program is checked")
        except BaseException as error:
            self._refuse(error)
            raise
        finally:
            self._leave()
        if self._level:
            what = f"recorded {self.captured.name}"
            say(f"{program_line(self.captured.program, what)}, at {user_location()}")
        return handed_out

    def _finish(self, recorder: Recorder, result: Any) -> Any:
        if recorder.has_deferred and self._training:
            self._agree("the step reads a tensor on the host, and is recorded again")
            handed_out = recorder.finish_unrecorded(result)
            del recorder, result
            self._settle(*NextStep(self._recorder, self._called).as_compiling())
        elif recorder.has_deferred:
            self._agree("the call reads a tensor on the host, and is recorded again")
            handed_out, plain = recorder.finish_plain(result)
            del recorder, result
            self._settle(*recorded_as_compiling(plain, self._recorder, self._called), plain.read)
        elif made := recorder.end_step():
            self._agree("the first step is made, and the next one is recorded")
            handed_out = recorder.finish_unrecorded(result)
            del recorder, result
            self._settle(*NextStep(self._recorder, self._called).recorded(made), "")
        else:
            handed_out, recording = recorder.finish(result)
            self._fakes_given.close()
            bound = guarded(recorder, recorded_program(recorder, recording))
            try:
                self._settle(bound, recording.seen, "")
            except CaptureError as error:
                self._settle_as_compiling(recorder, error)
        return handed_out

    def _settle(self, bound: BoundProgram, seen: WholeProgram | None, avoided_read: str) -> None:
        """Store the recorded Program in the Captured, with its Family if sizes may vary.

        Args:
            bound: the recorded Program.
            seen: everything observed in the call, if sizes may vary.
            avoided_read: the host read that `is_compiling()` true avoided; empty: it was false.

        Raises:
            CaptureError: sizes are to vary, and may not.
        """
        if self._varying is not None:
            # Imports sympy and torch's symbolic shapes, which takes seconds.
            from offload.record.second_recordings import SecondRecordings  # noqa: PLC0415

            if seen is None or bound.program.opaque is not None:
                raise CaptureError(
                    "sizes cannot vary where the call is one opaque launch, since offload cannot "
                    "see what depends on them: leave out dynamic_shapes"
                )
            if bound.program.groups:
                raise CaptureError(
                    "sizes cannot vary where ranks exchange tensors, since all ranks must know "
                    "their sizes: leave out dynamic_shapes"
                )
            recordings = SecondRecordings(self._function, self._called, self._varying, avoided_read)
            self.captured._bound_family = recordings.family(seen)
        self.captured._bound = bound

    def _settle_as_compiling(self, recorder: Recorder, error: CaptureError) -> None:
        """Record the call again with `is_compiling()` true, if that may change its path.

        Libraries look at tensors to take shortcuts, except where they see symbolic sizes.

        Args:
            recorder: of the first call.
            error: why its sizes may not vary.

        Raises:
            CaptureError: the error, if that does not help.
        """
        plain = recorder.plain_call(str(error), "its sizes may vary")
        if plain is None:
            raise error
        try:
            self._settle(*recorded_as_compiling(plain, self._recorder, self._called), plain.read)
        except CaptureError as again:
            error.add_note(f"when torch.compiler.is_compiling() returns True: {again}")
            raise error from None


def begin_call(
    recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Begin the recording, unless the call uses a name that is a keyword of executions.

    Raises:
        CaptureError: it does; or an argument cannot be recorded.
    """
    for name in (*parameters_of(function).positional[: len(args)], *kwargs):
        if name in _RESERVED:
            raise CaptureError(
                f"the call passes the model's parameter {name!r}, a keyword by which executions "
                "take buffers: rename the parameter, or capture a function that calls the model "
                "and uses another name"
            )
    return recorder.begin(args, kwargs)
