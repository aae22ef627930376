"""Pools of torch's allocator that offload makes for itself: their use, their memory and their end.

Torch ends the process where a `MemPool` goes while anything is allocated into a pool of its device:
in a capture, or in a `use_mem_pool` of any thread. The destructor releases the pool's memory, which
asserts `captures_underway.empty()` (`synchronize_and_free_events` of c10/cuda/
CUDACachingAllocator.cpp), and a destructor cannot raise: pytorch/pytorch#159301, #180395. The
allocator of torch_npu is made after it. Pools therefore go here, where no region of offload's is
under way; of regions that others begin, torch tells no more than a capture on the current stream.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Held while a region begins or ends and while pools go. The garbage collector may close a pool at
# any line, so that a thread may come here again.
_lock = threading.RLock()
_regions: list[object] = []  # a token for each that is under way
_ending: list[tuple[Any, torch.device]] = []


def _begin_anew() -> None:
    """In the child of a fork, which lacks the threads that held the lock or were in a region.

    A fork does not take the lock: other libraries hold locks across it, under which the garbage
    collector may close a pool. No pool goes in a child, whose device refuses everything.
    """
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _regions.clear()


os.register_at_fork(after_in_child=_begin_anew)


class MemoryPool:
    """A `MemPool` of torch's that goes when torch can take it, however late it is dropped.

    Owner: whoever made it; it must outlive what uses its memory, such as graphs and generators.
    Thread: any.
    """

    def __init__(self, device: torch.device, *arguments: Any, **options: Any) -> None:
        """Make a pool that holds nothing.

        Args:
            device: an accelerator.
            arguments: of torch's `MemPool` for this device.
            options: the same.
        """
        self._device = device
        module: Any = torch.get_device_module(device)
        self._pool: Any = module.MemPool(*arguments, **options)

    @property
    def id(self) -> tuple[int, int]:
        """By what torch knows it."""
        found: tuple[int, int] = tuple(self._pool.id)
        return found

    def use_count(self) -> int:
        """How many there are that use it, this object among them."""
        count: int = self._pool.use_count()
        return count

    def snapshot(self, **options: Any) -> list[dict[str, Any]]:
        """Its segments, by torch's snapshot of it alone; see `segments_of`."""
        segments: list[dict[str, Any]] = self._pool.snapshot(**options)
        return segments

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Let this thread allocate from it."""
        module: Any = torch.get_device_module(self._device)
        with region(), module.use_mem_pool(self._pool, self._device):
            yield

    def close(self) -> None:
        """Let it go, at once or when no region is under way any more; it is of no use after that.

        Memory that is still used then stays so; freed later, it is the device's again once torch's
        cache is emptied.
        """
        pool, self._pool = self._pool, None
        if sys.is_finalizing():
            _keep(pool)
        elif pool is not None:
            with _lock:
                _ending.append((pool, self._device))
                del pool
                _end_pools()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self.close()


@contextlib.contextmanager
def region() -> Iterator[None]:
    """While something is captured, or allocated into a pool; no pool of offload's goes then."""
    mine = object()
    try:
        with _lock:
            _end_pools()
            _regions.append(mine)
        yield
    finally:
        with _lock:
            if mine in _regions:
                _regions.remove(mine)
            _end_pools()


def _end_pools() -> None:
    """Let closed pools go, if no region is under way; with the lock held.

    Those of a device that refuses stay, and keep no other device's. The collector may come here
    again at any line, so that what was found may have gone meanwhile.
    """
    refusing: set[torch.device] = set()
    while not _regions:
        found = next((one for one in _ending if one[1] not in refusing), None)
        if found is None:
            return
        if _refuses(found[1]):
            refusing.add(found[1])
        elif found in _ending:
            _ending.remove(found)


def _refuses(device: torch.device) -> bool:
    """Whether its memory cannot be freed now: in a capture, after a fault, in a fork's child."""
    module: Any = torch.get_device_module(device)
    try:
        with module.device(device):  # whose stream torch asks whether it is captured
            with contextlib.suppress(RuntimeError):  # of a runtime that has no captures
                if module.is_current_stream_capturing():
                    return True
            module.current_stream(device).query()
    except RuntimeError:
        return True
    return False


def _keep(pool: Any) -> None:
    """Never let a pool go: where the interpreter ends, the driver frees all memory itself."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


@atexit.register
def _keep_all() -> None:
    for pool, _ in _ending:
        _keep(pool)


def segments_of(pool: Any, device: torch.device) -> list[dict[str, Any]]:
    """The segments of a `MemPool`, as torch's snapshots describe them.

    torch_npu 2.13.0 gives away a reference to each number of a pool's id whenever it is asked for
    the snapshot of one pool, until Python frees numbers that are in use. A snapshot of all does
    not.
    """
    if device.type != "npu":
        segments: list[dict[str, Any]] = pool.snapshot()
        return segments
    module: Any = torch.get_device_module(device)
    number = tuple(pool.id)
    return [one for one in module.memory_snapshot() if tuple(one["segment_pool_id"]) == number]


def live_blocks(segments: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The blocks of segments that somebody has now, as torch's snapshots describe them."""
    for segment in segments:
        yield from (one for one in segment["blocks"] if one["state"] == "active_allocated")
