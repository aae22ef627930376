"""Steps that train whose Program is recorded from the step behind them, which is undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from offload.api.recorded_program import recorded_program
from offload.errors import CaptureError
from offload.program import BoundProgram
from offload.record import PlainCall, Recorder, WholeProgram


def guarded(recorder: Recorder, bound: BoundProgram) -> BoundProgram:
    """The Program with what each execution of a step has to compare."""
    guard = recorder.guard()
    if guard is None:
        return bound
    bindings = dataclasses.replace(bound.bindings, before_execution=guard)
    return BoundProgram(bound.program, bindings)


class NextStep:
    """The step behind one that was made: recorded, and undone.

    The first step of a training makes gradients and an optimizer's state. Those behind it find
    them, so that they do something else, and all the same.
    """

    def __init__(
        self, recorder: Callable[..., Recorder], called: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> None:
        """Record with these.

        Args:
            recorder: makes one; takes `plain`.
            called: what the step is called with.
        """
        self._recorder = recorder
        self._called = called

    def told(self) -> tuple[BoundProgram, WholeProgram | None, str]:
        """Record it told that it is being compiled, so that it reads nothing on the host.

        It is made untold before that, and undone, to be compared with: from the same state.

        Returns:
            The Program, all that was seen, and which read was avoided.

        Raises:
            CaptureError: they differ; or it cannot be recorded.
        """
        recorder = self._recorder()
        try:
            result = recorder.call_again(*self._called)
            if not recorder.has_deferred:
                recorder.abandon()
                raise CaptureError(
                    "the step reads a tensor on the host in one call, and in the next one not: "
                    "which of them executions are to repeat is not known"
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
            made: what the first step made; empty where that is not known.
            plain: the same step untold, where this one is told that it is being compiled.

        Raises:
            CaptureError: this one makes something as well; or it cannot be recorded.
        """
        recorder = self._recorder(plain=plain)
        try:
            result = recorder.call_again(*self._called)
            if again := recorder.end_step():
                recorder.abandon()
                raise CaptureError(
                    f"the step makes {again} anew in each call{', ' * bool(made)}{made}: a replay "
                    "would not hand that on; write it in place"
                )
            _, recording = recorder.finish(result)
            return guarded(recorder, recorded_program(recorder, recording)), recording.seen
        finally:
            recorder.undo()
