"""A captured graph as data, read through the driver's API."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable


class NodeKind(enum.StrEnum):
    """The kinds of nodes that a captured graph may have; others are refused."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    EMPTY = "empty"


Edge = tuple[int, int]
"""`(before, after)`, by node index."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a graph.

    Attributes:
        handle: the driver's, valid as long as the graph.
        kind: what it does.
        name: for people: a kernel's name.
        signature: all that must agree between captures besides the bytes of `parts`.
        parts: bytes in which addresses may stand. Of a kernel its packed arguments; of a memcpy
            the addresses of source and destination (a host source counts as 0), and then the bytes
            of a host source; of a memset the destination.
        parameters: of a kernel the (offset, size) in bytes of each argument in the first part.
    """

    handle: int
    kind: NodeKind
    name: str
    signature: Hashable
    parts: tuple[bytes, ...]
    parameters: tuple[tuple[int, int], ...] = ()
