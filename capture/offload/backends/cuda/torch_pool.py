"""torch's memory during a capture: every allocation in the discovery pool, none used twice.

torch's allocator takes its memory from the pool by the two C functions of the native module, and
divides none of it (`no_split`). It would reuse freed memory: results are kept, and what an operator
freed is taken at once by a filler, so that each operator's scratch memory is separate. If an
operator places its result in memory that it freed before, words of a larger allocation would name
the result: this is found by torch's record of requests, and the result is copied in another
capture. If nothing there was larger, everything fits into the result's own memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from offload.backends.captured.relocation.captures import Allocation
from offload.errors import CaptureError, ExecutionError
from offload.interpreter.memory_pools import MemoryPool
from offload.native import _native

# torch's allocator has two lists of blocks: requests up to 1 MiB get blocks of 2 MiB, and larger
# requests larger blocks (kSmallSize and kSmallBuffer in c10/cuda/CUDACachingAllocator.h).
_SMALL_REQUEST_BYTES = 1 << 20
_SMALL_BLOCK_BYTES = 2 << 20


@functools.cache
def _pluggable() -> Any:
    """The wrapper of the pool's functions for torch, which may free until the process ends."""
    return torch.cuda.memory.CUDAPluggableAllocator(
        _native.__file__, "offload_cuda_pool_malloc", "offload_cuda_pool_free"
    )


class PoolMemory:
    """The allocations of one capture. Thread: the capture's.

    Attributes:
        torch_pool: for `capture_begin`; must outlive its tensors.
        kept: tensors that only occupy memory.
    """

    def __init__(self, pool: _native.DiscoveryPool, device: int) -> None:
        self.torch_pool = MemoryPool(
            torch.device("cuda", device), _pluggable().allocator(), no_split=True
        )
        self.kept: list[torch.Tensor] = []
        self._pool = pool
        self._device = device
        self._n_seen = 0
        self._stand_ins: dict[int, int] = {}  # by address, in bytes
        self._idle: set[int] = set()
        self._fillers: dict[int, int] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Serve allocations, and let torch record them.

        Raises:
            CaptureError: torch's memory history is already being recorded.
        """
        if torch._C._cuda_isHistoryEnabled():
            raise CaptureError(
                "torch's memory history is being recorded, and loading a program needs that "
                "recording for itself: end it with torch.cuda.memory._record_memory_history(None)"
            )
        _native.DiscoveryPool.set_current(self._pool)
        try:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", clear_history=True
            )
            try:
                yield
            finally:
                torch.cuda.memory._record_memory_history(None, stacks="python")
        finally:
            _native.DiscoveryPool.set_current(None)

    def stand_in(self, size_bytes: int) -> torch.UntypedStorage:
        """Addresses for a Value that no launch makes; before the capture begins.

        They do not come from torch, which would count them as memory of the process: a user's limit
        (`set_per_process_memory_fraction`) is meant for real memory.

        Raises:
            ExecutionError: the pool has no addresses.
        """
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device).untyped_storage()
        try:
            address = self._pool.allocate(size_bytes)
        except ExecutionError as error:
            raise ExecutionError(f"no addresses for {size_bytes} bytes: {error}") from error
        self._stand_ins[address] = size_bytes
        self._n_seen = self._pool.n_events
        on = f"cuda:{self._device}"
        return _native.cuda_tensor_at(address, size_bytes, on).untyped_storage()

    def settle(self, held: Collection[int]) -> None:
        """Take what the latest launch has freed, so that no later launch receives it.

        Args:
            held: the addresses of its results.
        """
        blocks = [event for event in self._pool.events(self._n_seen) if event[0] == "allocate"]
        for _, address, size_bytes in blocks:
            if address not in held:
                self._fill(size_bytes)
        self._n_seen = self._pool.n_events

    def _fill(self, size_bytes: int) -> None:
        """Take a free block of this size; if there is none, it is a new one."""
        small = size_bytes <= _SMALL_BLOCK_BYTES
        n_before = self._pool.n_events
        filler = torch.empty(
            _SMALL_REQUEST_BYTES if small else size_bytes, dtype=torch.uint8, device=self._device
        )
        self.kept.append(filler)
        address = filler.data_ptr()
        if self._pool.n_events > n_before:
            self._idle.add(address)
        else:
            self._fillers[address] = self._fillers.get(address, 0) + 1

    def allocations(
        self, values: Mapping[int, int], sizes_bytes: Mapping[int, int]
    ) -> tuple[list[Allocation], set[int]]:
        """All allocations, while torch still records.

        Args:
            values: the Value at each address.
            sizes_bytes: by Value.

        Returns:
            The allocations in order, and the Values whose memory was part of something larger
            before.

        Raises:
            ExecutionError: torch's record is not complete.
        """
        requests = self._requests()
        found, recycled = [], set()
        for kind, address, _ in self._pool.events():
            if kind != "allocate" or address in self._idle:
                continue
            if address in self._stand_ins:
                found.append(Allocation(address, self._stand_ins[address], values.get(address)))
                continue
            sizes = requests.get(address, [])
            n_own = len(sizes) - self._fillers.get(address, 0)
            if n_own < 1:
                raise ExecutionError(
                    f"torch has no record of the request for the memory at {address:#x}: another "
                    "thread ended the recording of its memory history"
                )
            value = values.get(address)
            size_bytes = max(sizes[:n_own]) if value is None else sizes_bytes[value]
            if value is not None and any(one > size_bytes for one in sizes[: n_own - 1]):
                recycled.add(value)
            found.append(Allocation(address, size_bytes, value))
        return found, recycled

    def _requests(self) -> dict[int, list[int]]:
        """By address, the bytes of each request that received it, in order."""
        requests: dict[int, list[int]] = {}
        for entry in torch.cuda.memory._snapshot()["device_traces"][self._device]:
            if entry["action"] == "alloc":
                requests.setdefault(entry["addr"], []).append(entry["size"])
        return requests
