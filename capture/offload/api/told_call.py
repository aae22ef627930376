"""A call that is recorded again, told that it is being compiled, as it then reads nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.api.recorded_program import recorded_program
from offload.errors import CaptureError
from offload.program import BoundProgram
from offload.record import PlainCall, Recorder, WholeProgram


def recorded_told(
    plain: PlainCall,
    recorder: Callable[..., Recorder],
    called: tuple[tuple[Any, ...], dict[str, Any]],
) -> tuple[BoundProgram, WholeProgram | None]:
    """Record the same call told that it is being compiled; it leaves the same state.

    Args:
        plain: the call untold.
        recorder: makes a Recorder; takes `plain`.
        called: the arguments of the call.

    Returns:
        The Program, and everything observed.

    Raises:
        CaptureError: it does something else, or also reads on the host.
    """
    try:
        plain.put_back(before=True)
        told = recorder(plain=plain)
        try:
            result = told.call_again(*called)
        except Exception as error:
            raise _refusal(plain, error) from error
        recording = told.finish(result)[1]
        return recorded_program(told, recording), recording.seen
    finally:
        plain.put_back(before=False)


def _refusal(plain: PlainCall, error: Exception) -> CaptureError:
    """The refusal of a host read that the call does not avoid when told to."""
    refusal = CaptureError(plain.refusal)
    refusal.add_note(
        "when torch.compiler.is_compiling() returns True, the model raises "
        f"{type(error).__qualname__}: {error}"
    )
    return refusal
