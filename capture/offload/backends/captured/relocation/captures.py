"""What a capture gives: a graph as data, and the addresses that may stand in it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Sequence, Set
from typing import Any

from offload.backends.captured.random_draws import RandomState
from offload.program import Program


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
        overlaps: of a kernel the nodes, by index, that an edge leads from and that need not have
            ended when it begins.
    """

    handle: int
    kind: NodeKind
    name: str
    signature: Hashable
    parts: tuple[bytes, ...]
    parameters: tuple[tuple[int, int], ...] = ()
    overlaps: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of the discovery pool, at an address of its own with guard gaps on both sides.

    Attributes:
        address: where it begins in this capture's layout.
        size_bytes: how much was asked for.
        value: the Value of the Program that it holds; None for an operator's scratch memory.
    """

    address: int
    size_bytes: int
    value: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedRange:
    """Device memory outside the pool that outlives the graph, and who keeps it."""

    address: int
    size_bytes: int
    owner: str


RANDOM_OWNER = "torch's random state"
"""Owner of the memory from which random kernels read a generator's seed and offset."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphCapture:
    """One capture of a Program's launches.

    Attributes:
        graph: the driver's handle of the graph.
        nodes, edges: the graph as data.
        launches: for each node the Program launch that made it; -1 where none did.
        allocations: of the pool, Values and scratch, in the order in which they were made.
        owned: what a constant address may point into.
        keep: whatever has to live as long as the graph is used.
        random: of a graph with random kernels; their seed and offset lie in ranges of
            RANDOM_OWNER, and stand in their arguments side by side, the seed first
            (PhiloxCudaState in torch's PhiloxCudaStateRaw.cuh).
        host_words: what eight bytes of its kernels' arguments hold, at multiples of four, where
            that was an address of the host's memory which the driver did not know.
        host_upper_halves: the upper four bytes of addresses of the host's memory.
        workspace_bytes: of a library's workspace, which it lets launches of one stream share and in
            which none finds what an earlier one left; 0: nobody says.
    """

    graph: int
    nodes: Sequence[GraphNode]
    edges: Sequence[Edge]
    launches: Sequence[int]
    allocations: Sequence[Allocation]
    owned: Sequence[OwnedRange]
    keep: Any
    random: RandomState | None = None
    host_words: Set[int] = frozenset()
    host_upper_halves: Set[int] = frozenset()
    workspace_bytes: int = 0


def launch_names(program: Program) -> list[str]:
    """What launches are called in messages: the operator, and the user's line."""
    return [f"{launch.name} at {launch.source}" for launch in program.launches]


def node_text(capture: GraphCapture, launch_names: Sequence[str], node: int) -> str:
    """A node for messages: kind, name, and the launch that made it."""
    one, launch = capture.nodes[node], capture.launches[node]
    made_by = launch_names[launch] if 0 <= launch < len(launch_names) else ""
    return f"{one.kind} {one.name!r} (node {node})" + (f" of {made_by}" if made_by else "")


def place_text(capture: GraphCapture, node: int, part: int, offset_bytes: int) -> str:
    """Where in a node a byte lies, for messages: the parameter, or the place in a host table."""
    if part:
        return f"byte {offset_bytes} of a host table"
    for index, (begin, size_bytes) in enumerate(capture.nodes[node].parameters):
        if begin <= offset_bytes < begin + size_bytes:
            return f"parameter {index}"
    return f"byte {offset_bytes}"
