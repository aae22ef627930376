"""Tickets: executions that were submitted."""

from __future__ import annotations

from typing import Any, NoReturn

from offload.errors import CopyError
from offload.native import _native


class Ticket:
    """An execution that was submitted. Dropping it does not stop the execution."""

    def __init__(self, native: _native.Ticket) -> None:
        self._native = native

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "a ticket belongs to an execution of this process, and cannot be copied or pickled: "
            "take its result()"
        )

    def done(self) -> bool:
        """Whether the execution has ended, well or not."""
        return self._native.done()

    def wait(self) -> None:
        """Block until the execution has ended.

        Raises:
            ExecutionError: a launch failed.
            CaptureError: an operator laid its result out otherwise than it was recorded.
            BindingError: a guard found another value than the recorded one.
        """
        self._native.wait()

    def result(self) -> Any:
        """Wait, and return what the model returns; the same objects at each call.

        Raises:
            ExecutionError, CaptureError, BindingError: as `wait`.
        """
        return self._native.result()
