"""Processes that end with all their descendants: a device may hold on to any of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def begin(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process as the first of a new group; `options` are Popen's."""
    return subprocess.Popen(command, start_new_session=True, **options)


def end(process: subprocess.Popen[Any], asked_s: float = 0.0) -> int:
    """End a process started by `begin`, with its group; return the exit status.

    Args:
        process: interrupted first, as by a terminal, if it is given time.
        asked_s: time to end by itself, in seconds; then it is killed.
    """
    if asked_s > 0:
        _signal(process, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(asked_s)
    _signal(process, signal.SIGKILL)
    return process.wait()


def _signal(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
