"""Training steps whose Program is recorded from the next step, which is undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from offload.api.recorded_program import recorded_program
from offload.errors import CaptureError
from offload.program import BoundProgram
from offload.record import PlainCall, Recorder, WholeProgram


def guarded(recorder: Recorder, bound: BoundProgram) -> BoundProgram:
    """The Program with the comparison that each execution of a step makes."""
    guard = recorder.guard()
    if guard is None:
        return bound
    bindings = dataclasses.replace(bound.bindings, before_execution=guard)
    return BoundProgram(bound.program, bindings)


class NextStep:
    """The step after an executed one: recorded, and undone.

    The first step of a training makes gradients and an optimizer's state. Later steps find them, so
    that they differ from the first and are all the same.
    """

    def __init__(
        self, recorder: Callable[..., Recorder], called: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> None:
        """Keep what a recording needs.

        Args:
            recorder: makes a Recorder; takes `plain`.
            called: the arguments of the step.
        """
        self._recorder = recorder
        self._called = called

    def as_compiling(self) -> tuple[BoundProgram, WholeProgram | None, str]:
        """Record it with `is_compiling()` true, so that it reads nothing on the host.

        First it is made with `is_compiling()` false and undone, to compare both from one state.

        Returns:
            The Program, everything observed, and the read that was avoided.

        Raises:
            CaptureError: they differ; or it cannot be recorded.
        """
        recorder = self._recorder()
        try:
            result = recorder.call_again(*self._called)
            if not recorder.has_deferred:
                recorder.abandon()
                raise CaptureError(
                    "the step reads a tensor on the host in one call but not in the next: which "
                    "of the two executions should repeat is not known"
                )
            _, plain = recorder.finish_plain(result)
        finally:
            recorder.undo()
        return *self.recorded("", plain), plain.read

    def recorded(
        self, made: str, plain: PlainCall | None = None
    ) -> tuple[BoundProgram, WholeProgram | None]:
        """Record it.

        Args:
            made: what the first step made; empty if unknown.
            plain: the same step with `is_compiling()` false, if this one sees it true.

        Raises:
            CaptureError: this step also makes something; or it cannot be recorded.
        """
        recorder = self._recorder(plain=plain)
        try:
            result = recorder.call_again(*self._called)
            if again := recorder.end_step():
                recorder.abandon()
                raise CaptureError(
                    f"the step creates {again} in each call{', ' * bool(made)}{made}: a replay "
                    "would not pass it on to the next step; write it in place"
                )
            _, recording = recorder.finish(result)
            return guarded(recorder, recorded_program(recorder, recording)), recording.seen
        finally:
            recorder.undo()
