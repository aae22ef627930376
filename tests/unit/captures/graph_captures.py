"""Hand-made captures of a CUDA graph: nodes, and the memory that their words point into."""

from __future__ import annotations

import struct

from offload.backends.captured.relocation.captures import (
    Allocation,
    GraphCapture,
    GraphNode,
    NodeKind,
)

MIB = 1 << 20
SIZES = (4096, 64, 3 * MIB)  # two Values and a scratch allocation
VALUES = (0, 1, None)


class Layout:
    """Addresses of a capture; `number` distinguishes the four captures."""

    def __init__(self, number: int) -> None:
        self.number = number
        place = {0: 0, 1: 0, 2: 1, 3: 2}[number]
        base = 0x7F00_0000_0000 + place * 0x10_0000_0000
        self.addresses = []
        for index, size in enumerate(SIZES):
            base += 2 * MIB + 512 * (1 + place) * (index + 1)
            self.addresses.append(base)
            base += size

    def __getitem__(self, index: int) -> int:
        return self.addresses[index]


LAYOUTS = [Layout(number) for number in range(4)]


def kernel(content: bytes, parameters: int = 8, signature: object = "grid 1") -> GraphNode:
    places = tuple((at, parameters) for at in range(0, len(content), parameters))
    return GraphNode(1, NodeKind.KERNEL, "fill_kernel", signature, (content,), places)


def capture(*nodes: GraphNode, layout: Layout, **changes: object) -> GraphCapture:
    fields = {
        "graph": 1,
        "nodes": nodes,
        "edges": [(i, i + 1) for i in range(len(nodes) - 1)],
        "launches": list(range(len(nodes))),
        "allocations": [
            Allocation(address, size, value)
            for address, size, value in zip(layout.addresses, SIZES, VALUES, strict=True)
        ],
        "owned": [],
        "keep": None,
    }
    return GraphCapture(**{**fields, **changes})


def pack(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}Q", *(word % (1 << 64) for word in words))


def memcpy(*parts: bytes) -> GraphNode:
    return GraphNode(1, NodeKind.MEMCPY, "copy", (64,), parts)
