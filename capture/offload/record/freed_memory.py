"""The memory that a recording held and has freed, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from offload.program import PLACED_ROLES, Program

# A recording of less is not worth a walk over all free memory of the process.
_LEAST_BYTES = 2**23


def give_back_freed(program: Program) -> None:
    """Give the system what the C library keeps of the memory that a recording has freed.

    A recording holds each value of the call until its end, since a value's memory is its identity:
    many times what the call or an execution needs at once. Freed in pieces, below memory that is
    still used, this would stay with the process. Nothing is done for small programs, and where the
    C library is not glibc.
    """
    held_bytes = sum(one.size_bytes for one in program.values if one.role in PLACED_ROLES)
    trim = _malloc_trim()
    if trim is not None and program.device == "cpu" and held_bytes >= _LEAST_BYTES:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
