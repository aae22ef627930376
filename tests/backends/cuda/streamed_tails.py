"""Weights with tails in mapped memory, and what they hold of a device."""

from __future__ import annotations

import gc

from offload.plan.streaming import Streaming

KIB = 1024

GRANULE = 16 * KIB

HELD = ("executable", "graph", "stream", "event", "memory handle", "mapping", "reservation")


def tails_of(plan: Streaming) -> list:
    return [piece for piece in plan.pieces if piece.streamed and piece.offset_bytes]


def share_memory(one, other) -> bool:
    begin = max(one.memory_offset_bytes, other.memory_offset_bytes)
    ends = (each.memory_offset_bytes + each.size_bytes for each in (one, other))
    return one is not other and begin < min(ends)


def held(simulator, expected: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Live device resources; garbage is collected unless they are as expected at once."""
    found: tuple[int, ...] | None = None
    for collects in (expected is None, True):
        if collects:
            gc.collect()
        counts = tuple(simulator.live(kind) for kind in HELD)
        found = (*counts, simulator.host_bytes, simulator.physical_bytes)
        if found == expected:
            break
    return found
