"""Torch's caching allocator, as far as captures use it: pools, reused blocks, a history.

After c10/cuda/CUDACachingAllocator.cpp and .h of torch 2.13: requests are rounded to 512 bytes;
those of up to 1 MiB get blocks of 2 MiB, others of 20 MiB or of a multiple of 2 MiB
(`get_allocation_size`, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge). The
smallest sufficient free block of the pool, the stream and the kind is reused (`get_free_block`),
and divided unless the pool forbids it (`should_split`, `no_split`). A request goes to the pool of
the latest filter that takes its stream (`get_pool`). Destroying a pool during a capture or a
`use_mem_pool` ends the process, here the test (`captures_underway`). Unused segments of the default
pool and of ended pools return to the device when the cache is emptied (`release_cached_blocks`,
`graph_pools_freeable`), which nothing does by itself here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

MINIMUM_BYTES = 512
SMALL_BYTES, SMALL_BLOCK_BYTES = 1 << 20, 2 << 20
LEAST_LARGE_BYTES, LARGE_BLOCK_BYTES, ROUND_LARGE_BYTES = 10 << 20, 20 << 20, 2 << 20

Allocate = Callable[[int, int], int]
Free = Callable[[int], None]


@dataclasses.dataclass
class Block:
    """A part of a segment.

    Attributes:
        segment: the address at which it begins.
        requested_bytes: of the allocation in it; 0: it is free.
    """

    address: int
    size_bytes: int
    stream: int
    segment: int
    is_small: bool
    requested_bytes: int = 0

    @property
    def is_free(self) -> bool:
        return self.requested_bytes == 0


class Pool:
    """A private pool, or the default pool."""

    def __init__(self, number: int, allocate: Allocate, free: Free, *, no_split: bool) -> None:
        self.id = (0, number)
        self.allocate, self.free = allocate, free
        self.no_split = no_split
        self.blocks: list[Block] = []
        self.segments: dict[int, int] = {}
        self.n_users = 0

    def snapshot(self) -> list[dict[str, Any]]:
        """Segments as torch describes them."""
        return [
            {
                "address": begin,
                "total_size": size_bytes,
                "blocks": [
                    {
                        "address": one.address,
                        "size": one.size_bytes,
                        "requested_size": one.requested_bytes,
                        "state": "inactive" if one.is_free else "active_allocated",
                    }
                    for one in self.blocks
                    if one.segment == begin
                ],
            }
            for begin, size_bytes in self.segments.items()
        ]


class CachingAllocator:
    """A device's allocator. Thread: under the interpreter's lock."""

    def __init__(self, allocate: Allocate, free: Free, current_stream: Callable[[], int]) -> None:
        self.default = Pool(0, allocate, free, no_split=False)
        self.pools: dict[tuple[int, int], Pool] = {self.default.id: self.default}
        self._ended: list[Pool] = []
        self.filters: list[tuple[object, Pool, Callable[[int], bool]]] = []
        self.trace: list[dict[str, Any]] | None = None
        self.error: BaseException | None = None
        self._current_stream = current_stream
        self._used: dict[int, tuple[Pool, Block]] = {}
        self._n_pools = 0

    # ---- pools -------------------------------------------------------------------------------

    def make_pool(self, allocate: Allocate | None, free: Free | None, *, no_split: bool) -> Pool:
        self._n_pools += 1
        own = self.default
        pool = Pool(self._n_pools, allocate or own.allocate, free or own.free, no_split=no_split)
        self.pools[pool.id] = pool
        return pool

    def begin(self, pool: tuple[int, int], takes: Callable[[int], bool]) -> object:
        """Serve streams that `takes` from a pool (`beginAllocateToPool`); return a token."""
        token = object()
        self.filters.append((token, self.pools[pool], takes))
        self.pools[pool].n_users += 1
        return token

    def end(self, token: object) -> None:
        """End the serving from a pool (`endAllocateToPool`)."""
        (found,) = (one for one in self.filters if one[0] is token)
        self.filters.remove(found)

    def end_all(self, pool: tuple[int, int]) -> None:
        """End the serving from a pool by its id; RuntimeError if none is under way."""
        tokens = [token for token, served, _ in self.filters if served.id == pool]
        if not tokens:
            raise RuntimeError("not currently recording to mempool_id")
        for token in tokens:
            self.end(token)

    def release(self, pool: tuple[int, int]) -> None:
        """Release a user of a pool (`releasePool`)."""
        self.pools[pool].n_users -= 1

    def end_pool(self, pool: Pool) -> None:
        """Destroy the pool, with its unused segments."""
        assert not self.filters, "torch ends the process: a pool went while one is captured into"
        _give_back_unused(pool)
        if pool.segments:
            self._ended.append(pool)

    def empty_cache(self) -> None:
        """Give back the unused segments of the default pool and of ended pools."""
        for pool in (self.default, *self._ended):
            _give_back_unused(pool)
        self._ended = [one for one in self._ended if one.segments]

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        pools = {**self.pools, **{one.id: one for one in self._ended}}
        return sum(sum(one.segments.values()) for one in pools.values())

    @property
    def allocated_bytes(self) -> int:
        """The bytes of used blocks."""
        return sum(block.size_bytes for _, block in self._used.values())

    # ---- memory ------------------------------------------------------------------------------

    def allocate(self, n_bytes: int) -> int:
        """Return an address, or 0 where memory is exhausted."""
        stream = self._current_stream()
        pool = next(
            (pool for _, pool, takes in reversed(self.filters) if takes(stream)), self.default
        )
        size_bytes = max(MINIMUM_BYTES, -(-n_bytes // MINIMUM_BYTES) * MINIMUM_BYTES)
        block = self._free_block(pool, size_bytes, stream) or self._new_block(
            pool, size_bytes, stream
        )
        if block is None:
            return 0
        if not pool.no_split and block.size_bytes - size_bytes >= (
            MINIMUM_BYTES if block.is_small else SMALL_BYTES + 1
        ):
            rest = dataclasses.replace(
                block,
                address=block.address + size_bytes,
                size_bytes=block.size_bytes - size_bytes,
            )
            block.size_bytes = size_bytes
            pool.blocks.insert(pool.blocks.index(block) + 1, rest)
        block.requested_bytes = n_bytes
        self._used[block.address] = (pool, block)
        self._note("alloc", block.address, n_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Free the block at once, and merge it with adjacent free blocks."""
        pool, block = self._used.pop(address)
        self._note("free_requested", address, block.requested_bytes)
        self._note("free_completed", address, block.requested_bytes)
        block.requested_bytes = 0
        for other in list(pool.blocks):
            is_beside = other.address + other.size_bytes == block.address or (
                block.address + block.size_bytes == other.address
            )
            if is_beside and other.is_free and other.segment == block.segment:
                block.address = min(block.address, other.address)
                block.size_bytes += other.size_bytes
                pool.blocks.remove(other)

    def _free_block(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        is_small = size_bytes <= SMALL_BYTES
        fitting = [
            one
            for one in pool.blocks
            if one.is_free
            and one.is_small == is_small
            and one.stream == stream
            and one.size_bytes >= size_bytes
        ]
        return min(fitting, key=lambda one: (one.size_bytes, one.address), default=None)

    def _new_block(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        is_small = size_bytes <= SMALL_BYTES
        block_bytes = SMALL_BLOCK_BYTES if is_small else LARGE_BLOCK_BYTES
        if size_bytes >= LEAST_LARGE_BYTES:
            block_bytes = -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        address = pool.allocate(block_bytes, stream)
        if not address:
            return None
        pool.segments[address] = block_bytes
        block = Block(address, block_bytes, stream, address, is_small)
        pool.blocks.append(block)
        self._note("segment_alloc", address, block_bytes)
        return block

    def _note(self, action: str, address: int, size_bytes: int) -> None:
        if self.trace is not None:
            self.trace.append({"action": action, "addr": address, "size": size_bytes})


def _give_back_unused(pool: Pool) -> None:
    for begin in list(pool.segments):
        blocks = [one for one in pool.blocks if one.segment == begin]
        if all(one.is_free for one in blocks):
            pool.blocks = [one for one in pool.blocks if one.segment != begin]
            del pool.segments[begin]
            pool.free(begin)
