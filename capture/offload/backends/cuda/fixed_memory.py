"""The graph's own memory, for what cannot be relocated, and the copies to and from it.

Inputs and outputs with unexplained words keep one address: see `relocation.fixed_values`. The graph
itself copies them: inputs before all its nodes, outputs and written inputs behind them. The other
side of each copy is an ordinary word, which an execution patches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from offload.backends.captured.copied_values import copied_value
from offload.backends.captured.relocation.captures import GraphCapture
from offload.backends.captured.relocation.fixed_values import (
    FixedAllocation,
    with_fixed,
)
from offload.backends.captured.relocation.words import WORD_BYTES, Word
from offload.backends.cuda.driver import call, driver_bindings
from offload.backends.cuda.graph import NodeReader
from offload.backends.cuda.memory import DeviceMemory, with_memory_of_torch
from offload.native import _native
from offload.program import Program, Role

_UNIT_BYTES = 512  # the alignment of torch's allocator and of the pool of discovery


@dataclasses.dataclass(frozen=True, slots=True)
class FixedMemory:
    """Memory at fixed addresses that are in a graph; empty by default.

    Attributes:
        fixed: the allocations in it.
        addresses: of these.
        numbers: of these allocations in a pool of discovery.
        mapping: the memory.
    """

    fixed: tuple[FixedAllocation, ...] = ()
    addresses: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    mapping: _native.ArenaMapping | None = None

    def fix(self, pool: _native.DiscoveryPool) -> None:
        """Make a pool without allocations return these addresses."""
        for number, address in zip(self.numbers, self.addresses, strict=True):
            pool.fix(number, address)

    def apart(self, capture: GraphCapture) -> GraphCapture:
        """A capture in such a pool, for discovery; raises CapturesDiffer as `with_fixed`."""
        return with_fixed(capture, self.fixed, self.addresses) if self.fixed else capture

    def activations(self, program: Program) -> frozenset[int]:
        """The activations in this memory, and thus outside the feature map."""
        return frozenset(
            one.value
            for one in self.fixed
            if one.value is not None and program.values[one.value].role is Role.ACTIVATION
        )

    def notes(self, program: Program) -> Iterator[str]:
        """Sentences for users on what is copied or stays, and why."""
        for one in self.fixed:
            if _is_slot(program, one):
                yield (
                    f"{one.name} is copied by the graph, whose kernels use it at a fixed address "
                    f"({one.size_bytes} bytes): {one.why}"
                )
            else:
                yield (
                    f"{one.name} lies outside the feature map, at a fixed address "
                    f"({one.size_bytes} bytes): {one.why}"
                )


def take_memory(
    device: int,
    capture: GraphCapture,
    pool: _native.DiscoveryPool,
    fixed: Sequence[FixedAllocation],
) -> FixedMemory:
    """Memory for some of a capture's allocations, for use in other captures.

    Args:
        device: of the memory.
        capture: made in `pool`.
        pool: has the order of all allocations.
        fixed: the allocations.

    Raises:
        OutOfMemory: the device has no memory left.
        ExecutionError: the driver failed.
    """
    made = (address for kind, address, _ in pool.events() if kind == "allocate")
    number_at = {address: number for number, address in enumerate(made)}
    sizes = [-(-one.size_bytes // _UNIT_BYTES) * _UNIT_BYTES for one in fixed]
    arena = _native.CudaArena(device)
    mapping = with_memory_of_torch(lambda: arena.map(sum(sizes)))
    begins = itertools.accumulate(sizes[:-1], initial=mapping.address)
    numbers = (number_at[capture.allocations[one.number].address] for one in fixed)
    return FixedMemory(tuple(fixed), tuple(begins), tuple(numbers), mapping)


def add_copies(
    device: int,
    program: Program,
    capture: GraphCapture,
    pool: _native.DiscoveryPool,
    memory: FixedMemory,
) -> tuple[GraphCapture, list[Word]]:
    """Make a captured graph copy inputs and outputs to and from fixed memory.

    The copies belong to no launch.

    Args:
        device: of the graph.
        program: the captured Program.
        capture: its graph gets more nodes.
        pool: of the capture; each copy gets an address in it for its other side.
        memory: the fixed memory.

    Returns:
        The capture with these nodes, and their words.

    Raises:
        ExecutionError: the driver failed.
    """
    copies = _Copies(program, capture, pool)
    with DeviceMemory(device):  # makes a context current
        for one, address in zip(memory.fixed, memory.addresses, strict=True):
            if _is_slot(program, one):
                assert one.value is not None
                copies.add(one.value, address)
    return copies.capture(), copies.words


def within_launches(
    program: Program, capture: GraphCapture, copies: Sequence[Word]
) -> GraphCapture:
    """A capture with copies in attributed to the first launch, and copies out to the last.

    A host that schedules launches then makes them too.
    """
    launches = list(capture.launches)
    for word in copies:
        launches[word.node] = len(program.launches) - 1 if word.offset_bytes else 0
    return dataclasses.replace(capture, launches=launches)


class _Copies:
    """The nodes added to a graph."""

    def __init__(
        self, program: Program, capture: GraphCapture, pool: _native.DiscoveryPool
    ) -> None:
        self._program = program
        self._captured = capture
        self._pool = pool
        self._nodes = list(capture.nodes)
        self._edges = list(capture.edges)
        self._reader = NodeReader()
        self.words: list[Word] = []
        # A node from which an overlapping edge leads need not have ended.
        overlapped = {
            (before, after) for after, node in enumerate(capture.nodes) for before in node.overlaps
        }
        ended = {edge[0] for edge in capture.edges if edge not in overlapped}
        behind = {after for _, after in capture.edges}
        numbers = range(len(capture.nodes))
        self._first = [number for number in numbers if number not in behind]
        self._last = [number for number in numbers if number not in ended]

    def add(self, value: int, address: int) -> None:
        """Copy an input or output to and from the memory at an address."""
        one = copied_value(self._program, value)
        if one.copied_in:
            source = self._pool.allocate(one.size_bytes)
            node = self._add(source, address, one.size_bytes, ())
            self.words.append(Word(node, 0, 0, value, 0))
            self._order([(node, after) for after in self._first])
        if one.copied_out:
            target = self._pool.allocate(one.size_bytes)
            node = self._add(address, target, one.size_bytes, self._last)
            self.words.append(Word(node, 0, WORD_BYTES, value, 0))

    def _add(self, source: int, target: int, n_bytes: int, after: Sequence[int]) -> int:
        driver = driver_bindings()
        params = driver.CUDA_MEMCPY3D()
        kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.srcMemoryType, params.dstMemoryType = kind, kind
        params.srcDevice, params.dstDevice = source, target
        params.WidthInBytes, params.Height, params.Depth = n_bytes, 1, 1
        before = [self._handle(one) for one in after]
        context = call("cuCtxGetCurrent")
        graph = driver.CUgraph(init_value=self._captured.graph)
        handle = call("cuGraphAddMemcpyNode", graph, before, len(before), params, context)
        self._nodes.append(self._reader.read(int(handle)))
        node = len(self._nodes) - 1
        self._edges += [(one, node) for one in after]
        return node

    def _order(self, edges: Sequence[tuple[int, int]]) -> None:
        driver = driver_bindings()
        ends = [[self._handle(node) for node in side] for side in zip(*edges, strict=True)]
        data = [driver.CUgraphEdgeData() for _ in edges]
        graph = driver.CUgraph(init_value=self._captured.graph)
        call("cuGraphAddDependencies", graph, *ends, data, len(edges))
        self._edges += edges

    def _handle(self, node: int) -> Any:
        return driver_bindings().CUgraphNode(init_value=self._nodes[node].handle)

    def capture(self) -> GraphCapture:
        """The capture with the added nodes."""
        n_added = len(self._nodes) - len(self._captured.nodes)
        return dataclasses.replace(
            self._captured,
            nodes=self._nodes,
            edges=self._edges,
            launches=[*self._captured.launches, *[-1] * n_added],
        )


def _is_slot(program: Program, one: FixedAllocation) -> bool:
    return one.value is not None and program.values[one.value].role in (Role.INPUT, Role.OUTPUT)
