"""What a capture gives: a graph as data, and the addresses that may stand in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from offload.backends.cuda.graph import Edge, GraphNode
from offload.backends.random_draws import RandomState
from offload.program import Program


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
    """

    graph: int
    nodes: Sequence[GraphNode]
    edges: Sequence[Edge]
    launches: Sequence[int]
    allocations: Sequence[Allocation]
    owned: Sequence[OwnedRange]
    keep: Any
    random: RandomState | None = None


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


class Capturer(Protocol):
    """Captures a Program's launches, whose memory comes from a pool of discovery."""

    def capture(self, program: Program, pool: Any) -> GraphCapture:
        """Run every launch once under stream capture; nothing executes on the pool's memory.

        Args:
            program: its launches are captured in order.
            pool: a `_native.DiscoveryPool`; every Value and every allocation of an operator lies
                in it.

        Raises:
            CaptureError: a launch cannot be captured; the message names it.
            ExecutionError: the driver failed.
        """


def device_of(program: Program) -> int:
    """The GPU that a Program was recorded on, or to which its file was read."""
    return current_device() if program.device_index is None else program.device_index


def current_device() -> int:
    """Torch's current GPU; the first one where torch finds none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0
