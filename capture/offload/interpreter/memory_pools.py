"""offload's pools of torch's allocator: their use, their memory and their end.

torch ends the process if a `MemPool` is destroyed while anything allocates into a pool of its
device: in a capture, or in a `use_mem_pool` of any thread. The destructor releases the pool's
memory, which asserts `captures_underway.empty()` (`synchronize_and_free_events` of c10/cuda/
CUDACachingAllocator.cpp), and a destructor cannot raise: pytorch/pytorch#159301, #180395. The
allocator of torch_npu is modelled on it. Pools are therefore destroyed here, while no region of
offload's is under way. Of other regions torch reports only whether the current stream is captured,
and torch_npu besides whether anything of the device is: its destructor synchronizes the device,
which the runtime refuses while any stream is captured (107027, ACL_ERROR_RT_STREAM_CAPTURED).
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

# Held while a region begins or ends and while pools are destroyed. The garbage collector may close
# a pool at any line, so the same thread may enter again.
_lock = threading.RLock()
_regions: list[object] = []  # a token for each region under way
_ending: list[tuple[Any, torch.device]] = []


def _begin_anew() -> None:
    """Reset in the child of a fork, which lacks the threads that held the lock or were in a region.

    A fork does not take the lock: other libraries hold locks across it, under which the garbage
    collector may close a pool. No pool of the parent is destroyed in a child, whose device refuses
    everything.
    """
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _regions.clear()
    _keep_all()
    _ending.clear()


os.register_at_fork(after_in_child=_begin_anew)


class MemoryPool:
    """A torch `MemPool` that is destroyed when torch permits it, however late it is dropped.

    Owner: its maker; it must outlive the users of its memory, such as graphs and generators.
    Thread: any.
    """

    def __init__(self, device: torch.device, *arguments: Any, **options: Any) -> None:
        """Create an empty pool.

        Args:
            device: an accelerator.
            arguments: of torch's `MemPool` for this device.
            options: the same.
        """
        self._device = device
        self._process = os.getpid()
        module: Any = torch.get_device_module(device)
        self._pool: Any = module.MemPool(*arguments, **options)

    @property
    def id(self) -> tuple[int, int]:
        """Its id in torch."""
        found: tuple[int, int] = tuple(self._pool.id)
        return found

    def use_count(self) -> int:
        """The number of users, including this object."""
        count: int = self._pool.use_count()
        return count

    def snapshot(self, **options: Any) -> list[dict[str, Any]]:
        """Its segments, from torch's snapshot of this pool; see `segments_of`."""
        segments: list[dict[str, Any]] = self._pool.snapshot(**options)
        return segments

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Let this thread allocate from it."""
        module: Any = torch.get_device_module(self._device)
        with region(), module.use_mem_pool(self._pool, self._device):
            yield

    def close(self) -> None:
        """Destroy the pool, at once or when no region is under way; it cannot be used afterwards.

        Memory still in use stays allocated; once freed, it returns to the device when torch's cache
        is emptied.
        """
        pool, self._pool = self._pool, None
        if sys.is_finalizing() or self._process != os.getpid():
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
    """A region that captures or allocates into a pool; no pool of offload's is destroyed in it."""
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
    """Destroy closed pools, if no region is under way; with the lock held.

    Pools of a refusing device stay, and do not delay those of others. The collector may enter again
    at any line, so that a pool that was found may already be destroyed.
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
    """Whether its memory cannot be freed now: in a capture or after a fault.

    A device that torch has not initialised captures nothing. Asking more would initialise it, under
    a lock that this thread may hold: the garbage collector may close a pool in `_lazy_call`.
    """
    module: Any = torch.get_device_module(device)
    if not module.is_initialized():
        return False
    try:
        with module.device(device):  # torch checks this device's current stream for a capture
            with contextlib.suppress(RuntimeError):  # from a runtime without captures
                if module.is_current_stream_capturing():
                    return True
            if device.type == "npu":
                module.synchronize(device)
            else:
                module.current_stream(device).query()
    except RuntimeError:
        return True
    return False


def _keep(pool: Any) -> None:
    """Never destroy a pool: at the interpreter's exit the driver frees all memory."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


@atexit.register
def _keep_all() -> None:
    for pool, _ in _ending:
        _keep(pool)


def segments_of(pool: Any, device: torch.device) -> list[dict[str, Any]]:
    """The segments of a `MemPool`, as torch's snapshots describe them.

    torch_npu 2.13.0 releases a reference to each number of a pool's id, without owning it, whenever
    a snapshot of one pool is taken, until Python frees numbers that are in use. A snapshot of all
    pools does not.
    """
    if device.type != "npu":
        segments: list[dict[str, Any]] = pool.snapshot()
        return segments
    module: Any = torch.get_device_module(device)
    number = tuple(pool.id)
    return [one for one in module.memory_snapshot() if tuple(one["segment_pool_id"]) == number]


def live_blocks(segments: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The allocated blocks of segments, as torch's snapshots describe them."""
    for segment in segments:
        yield from (one for one in segment["blocks"] if one["state"] == "active_allocated")
