"""Processes that end with all that they have started: a device may hold on to any of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def begin(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process as the first of a group of its own; `options` are Popen's."""
    return subprocess.Popen(command, start_new_session=True, **options)


def end(process: subprocess.Popen[Any], asked_s: float = 0.0) -> int:
    """End what `begin` has started, with its group; the exit status.

    Args:
        process: is interrupted first, as by a terminal, if it is given time.
        asked_s: to end by itself, in seconds; then it is killed.
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
