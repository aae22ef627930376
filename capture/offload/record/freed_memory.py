"""Gives memory that a recording has freed back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from offload.program import PLACED_ROLES, Program

# For smaller recordings a walk over all free memory of the process does not pay.
_LEAST_BYTES = 2**23


def give_back_freed(program: Program) -> None:
    """Give the system the freed memory of a recording that the C library keeps.

    A recording holds each value of the call until its end, since a value's memory is its identity:
    many times what the call or an execution needs at once. Freed in pieces below memory in use, it
    would stay with the process. A no-op for small programs, and where the C library is not glibc.
    """
    held_bytes = sum(one.size_bytes for one in program.values if one.role in PLACED_ROLES)
    trim = _malloc_trim()
    if trim is not None and program.device == "cpu" and held_bytes >= _LEAST_BYTES:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
