"""Recordings of a process run one at a time; which thread records."""

from __future__ import annotations

import os
import threading

from offload.errors import CaptureError

_recording = threading.local()


def is_recording() -> bool:
    """Whether this thread is recording a call."""
    return getattr(_recording, "active", False)


def refuse_nested() -> None:
    """Refuse a capture inside a call that this thread records.

    Raises:
        CaptureError: this thread is recording.
    """
    if is_recording():
        raise CaptureError(
            "a call is being recorded already: capture inside a captured call is not possible"
        )


class RecordingTurn:
    """Recordings of a process run one at a time, and calls on other threads wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin_in_child(self) -> None:
        """A forked process lacks the other threads, of which one may have been recording."""
        if not is_recording():
            self._lock = threading.Lock()

    def take(self) -> None:
        """Wait for the recordings of other threads; Ctrl-C ends the wait."""
        self._lock.acquire()
        _recording.active = True

    def give_back(self) -> None:
        """Let the next thread record."""
        _recording.active = False
        self._lock.release()


TURN = RecordingTurn()
"""Of this process."""
