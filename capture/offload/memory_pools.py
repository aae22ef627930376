"""What torch's allocator has taken from a device for a pool."""

from __future__ import annotations

from typing import Any

import torch


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
