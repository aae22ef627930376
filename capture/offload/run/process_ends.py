"""Forks and the exit of the process: both wait for executions.

The child of a fork has one thread, and begins with empty lanes (native/core/lane.cpp).
"""

from __future__ import annotations

import atexit
import os
import sys

from offload.native import _native


def register_waits() -> None:
    """Register, once in a process, what waits for executions before it forks or exits."""
    atexit.register(_native.close_all_lanes)
    # The native handler of fork waits after the handlers of others. From 3.13 on Python then holds
    # a lock that executing threads may need, and the wait must have ended before it: here.
    if sys.version_info >= (3, 13):
        os.register_at_fork(
            before=_native.hold_for_fork, after_in_parent=_native.release_after_fork
        )
    os.register_at_fork(after_in_child=_native.begin_in_child)
