"""The allocation sizes of torch_npu's allocator."""

from __future__ import annotations

import dataclasses

from offload.plan.topology import MemoryUnit

_MIB = 1 << 20
_LARGE_BYTES = 10 * _MIB
_SEGMENT_UNIT_BYTES = 2 * _MIB
_LEAST_REST_BYTES = 1 * _MIB


@dataclasses.dataclass(frozen=True, slots=True)
class TorchMemoryUnit(MemoryUnit):
    """Multiples of 512 bytes, with 32 bytes added to requests; large blocks in separate segments.

    A segment is a multiple of 2 MiB from 10 MiB on, and its rest stays with the block unless it is
    larger than 1 MiB (torch_npu's NPUCachingAllocator: kMinBlockSize, kMinLargeAlloc, kRoundLarge,
    kSmallSize). This holds for newly allocated memory; from its cache the allocator may return a
    block that is up to 1 MiB larger, and counts all of it.
    """

    unit_bytes: int = 512
    extra_bytes: int = 32

    def taken_bytes(self, size_bytes: int) -> int:
        """Implement MemoryUnit."""
        block_bytes = MemoryUnit.taken_bytes(self, size_bytes)
        segment_bytes = _segment_bytes(block_bytes)
        has_own_rest = segment_bytes - block_bytes > _LEAST_REST_BYTES
        return block_bytes if has_own_rest else segment_bytes

    def usable_bytes(self, budget_bytes: int) -> int:
        """Implement MemoryUnit."""
        block_bytes = budget_bytes // self.unit_bytes * self.unit_bytes
        segment_bytes = _segment_bytes(block_bytes)
        if 0 < segment_bytes - block_bytes <= _LEAST_REST_BYTES:
            block_bytes = segment_bytes - _LEAST_REST_BYTES - self.unit_bytes
        return max(0, block_bytes - self.extra_bytes)


def _segment_bytes(block_bytes: int) -> int:
    """Return the device bytes taken for a large block; for a small one its own size."""
    if block_bytes < _LARGE_BYTES:
        return block_bytes
    return -(-block_bytes // _SEGMENT_UNIT_BYTES) * _SEGMENT_UNIT_BYTES
