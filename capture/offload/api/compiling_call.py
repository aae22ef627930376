"""Records a call again with `torch.compiler.is_compiling()` true: models then avoid host reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.api.recorded_program import recorded_program
from offload.errors import CaptureError
from offload.program import BoundProgram
from offload.record import PlainCall, Recorder, WholeProgram


def recorded_as_compiling(
    plain: PlainCall,
    recorder: Callable[..., Recorder],
    called: tuple[tuple[Any, ...], dict[str, Any]],
) -> tuple[BoundProgram, WholeProgram | None]:
    """Record the same call with `is_compiling()` true; it leaves the same state.

    Args:
        plain: the call with `is_compiling()` false.
        recorder: makes a Recorder; takes `plain`.
        called: the arguments of the call.

    Returns:
        The Program, and everything observed.

    Raises:
        CaptureError: it does something else, or also reads on the host.
    """
    try:
        plain.put_back(before=True)
        compiling = recorder(plain=plain)
        try:
            result = compiling.call_again(*called)
        except Exception as error:
            raise _refusal(plain, error) from error
        recording = compiling.finish(result)[1]
        return recorded_program(compiling, recording), recording.seen
    finally:
        plain.put_back(before=False)


def _refusal(plain: PlainCall, error: Exception) -> CaptureError:
    """The refusal of a host read that the call makes even with `is_compiling()` true."""
    refusal = CaptureError(plain.refusal)
    refusal.add_note(
        "when torch.compiler.is_compiling() returns True, the model raises "
        f"{type(error).__qualname__}: {error}"
    )
    return refusal
