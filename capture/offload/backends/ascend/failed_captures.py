"""What a capture by torch_npu that failed at some call leaves, and how it goes."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from offload import _native


def abandon(graph: Any, pool: Any, stream: int, device: int) -> None:
    """End a capture that failed at any call, for torch and for the runtime.

    Torch gives up half-way where the runtime fails: its allocator may still take memory from the
    pool, and the stream may still be capturing.

    Args:
        graph: torch_npu's graph.
        pool: the pool that it captures in.
        stream: the runtime's handle of the stream that it captures on.
        device: where.
    """
    torch_npu: Any = importlib.import_module("torch_npu")
    _native.ascend_abandon_capture(stream)
    with contextlib.suppress(RuntimeError):  # since that has been ended already
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch_npu._C._npu_endAllocateToPool(device, pool.id)
    with contextlib.suppress(RuntimeError):
        graph.reset()
    if pool.use_count() > 1:  # a graph that was not captured leaves its use behind
        torch_npu._C._npu_releasePool(device, pool.id)
