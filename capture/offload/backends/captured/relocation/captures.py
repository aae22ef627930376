"""A capture as data: its graph, and the addresses that may occur in it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Sequence, Set
from typing import Any

from offload.backends.captured.random_draws import RandomState
from offload.program import Program


class NodeKind(enum.StrEnum):
    """The supported kinds of nodes of a captured graph; others are refused."""

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
        kind: of its work.
        name: for messages: a kernel's name.
        signature: everything that must be equal between captures besides the bytes of `parts`.
        parts: bytes that may hold addresses. For a kernel its packed arguments; for a memcpy the
            addresses of source and destination (0 for a host source), then the bytes of a host
            source; for a memset the destination.
        parameters: for a kernel the (offset, size) in bytes of each argument in the first part.
        overlaps: for a kernel the indices of nodes before it that need not have ended when it
            begins.
        declared: for a kernel that was launched with known arguments, the bytes of the first part
            at which addresses of eight bytes begin: all the rest is constant. None: not known.
    """

    handle: int
    kind: NodeKind
    name: str
    signature: Hashable
    parts: tuple[bytes, ...]
    parameters: tuple[tuple[int, int], ...] = ()
    overlaps: tuple[int, ...] = ()
    declared: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of the discovery pool, with guard gaps on both sides.

    Attributes:
        address: where it begins in this capture's layout.
        size_bytes: as requested.
        value: the Value of the Program that it holds; None for an operator's scratch memory.
    """

    address: int
    size_bytes: int
    value: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedRange:
    """Device memory outside the pool that outlives the graph, and its owner."""

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
        launches: for each node the Program launch that made it; -1 if there is none.
        allocations: of the pool, Values and scratch, in order.
        owned: ranges that a constant address may point into.
        keep: must live as long as the graph is used.
        random: for a graph with random kernels; their seed and offset lie in ranges of
            RANDOM_OWNER, and their addresses are adjacent in the arguments, the seed first
            (PhiloxCudaState in torch's PhiloxCudaStateRaw.cuh).
        host_words: values of eight bytes in its kernels' arguments, at multiples of four, that were
            addresses of host memory unknown to the driver.
        host_upper_halves: the upper four bytes of addresses of host memory.
        workspace_bytes: of a library's workspace, which launches of one stream share without using
            its former content; 0: unknown.
        added: indices of nodes that the capturer added: copies of results.
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
    added: Set[int] = frozenset()


def launch_names(program: Program) -> list[str]:
    """The names of launches in messages: the operator, and the user's line."""
    return [f"{launch.name} at {launch.source}" for launch in program.launches]


def node_text(capture: GraphCapture, launch_names: Sequence[str], node: int) -> str:
    """A node for messages: kind, name, and the launch that made it."""
    one, launch = capture.nodes[node], capture.launches[node]
    made_by = launch_names[launch] if 0 <= launch < len(launch_names) else ""
    return f"{one.kind} {one.name!r} (node {node})" + (f" of {made_by}" if made_by else "")


def place_text(capture: GraphCapture, node: int, part: int, offset_bytes: int) -> str:
    """The place of a byte in a node, for messages: the parameter, or the place in a host table."""
    if part:
        return f"byte {offset_bytes} of a host table"
    for index, (begin, size_bytes) in enumerate(capture.nodes[node].parameters):
        if begin <= offset_bytes < begin + size_bytes:
            return f"parameter {index}"
    return f"byte {offset_bytes}"
