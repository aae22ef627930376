"""Memory of a graph's own, for what cannot be relocated, and the copies that bring it there.

Inputs and outputs whose words nobody can explain keep one address: see `relocation.fixed_values`.
The graph itself copies them: inputs before all of its nodes, outputs and written inputs behind. Of
the copies the other side is a word like any other, which an execution patches.
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
from offload.backends.cuda.graph import NodeReader, call, driver_bindings
from offload.backends.cuda.memory import DeviceMemory, with_memory_of_torch
from offload.native import _native
from offload.program import Program, Role

_UNIT_BYTES = 512  # the alignment that torch's allocator gives, and the pool of discovery


@dataclasses.dataclass(frozen=True, slots=True)
class FixedMemory:
    """Memory whose addresses are in a graph, and stay; by default none.

    Attributes:
        fixed: what lies there.
        addresses: where each of them does.
        numbers: of these allocations in a pool of discovery.
        mapping: the memory.
    """

    fixed: tuple[FixedAllocation, ...] = ()
    addresses: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    mapping: _native.ArenaMapping | None = None

    def fix(self, pool: _native.DiscoveryPool) -> None:
        """Have a pool, of which nothing is allocated yet, give these addresses."""
        for number, address in zip(self.numbers, self.addresses, strict=True):
            pool.fix(number, address)

    def apart(self, capture: GraphCapture) -> GraphCapture:
        """A capture of such a pool as discovery takes it; raises CapturesDiffer as `with_fixed`."""
        return with_fixed(capture, self.fixed, self.addresses) if self.fixed else capture

    def activations(self, program: Program) -> frozenset[int]:
        """The activations that lie there, and in no feature map."""
        return frozenset(
            one.value
            for one in self.fixed
            if one.value is not None and program.values[one.value].role is Role.ACTIVATION
        )

    def notes(self, program: Program) -> Iterator[str]:
        """What is copied and what stays, and why, in sentences for people."""
        for one in self.fixed:
            if _is_slot(program, one):
                yield (
                    f"{one.name} is copied by the graph, whose kernels have it at an address that "
                    f"stays ({one.size_bytes} bytes): {one.why}"
                )
            else:
                yield (
                    f"{one.name} lies outside of the feature map, at an address that stays "
                    f"({one.size_bytes} bytes): {one.why}"
                )


def take_memory(
    device: int,
    capture: GraphCapture,
    pool: _native.DiscoveryPool,
    fixed: Sequence[FixedAllocation],
) -> FixedMemory:
    """Memory for some of a capture's allocations, to be given in other captures.

    Args:
        device: where.
        capture: that has been made in `pool`.
        pool: knows in which order all was allocated.
        fixed: the allocations.

    Raises:
        OutOfMemory: the device has none left.
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
    """Have a captured graph copy inputs and outputs to and from memory that stays.

    The copies are no launch's.

    Args:
        device: where.
        program: what was captured.
        capture: its graph gets more nodes.
        pool: that it was captured in, where each copy gets a place for its other side.
        memory: what stays.

    Returns:
        The capture with these nodes, and the words of them.

    Raises:
        ExecutionError: the driver failed.
    """
    copies = _Copies(program, capture, pool)
    with DeviceMemory(device):  # so that the driver can be asked
        for one, address in zip(memory.fixed, memory.addresses, strict=True):
            if _is_slot(program, one):
                assert one.value is not None
                copies.add(one.value, address)
    return copies.capture(), copies.words


def within_launches(
    program: Program, capture: GraphCapture, copies: Sequence[Word]
) -> GraphCapture:
    """A capture whose copies in are counted to the first launch, and those out to the last one.

    So a host that schedules launches makes them too.
    """
    launches = list(capture.launches)
    for word in copies:
        launches[word.node] = len(program.launches) - 1 if word.offset_bytes else 0
    return dataclasses.replace(capture, launches=launches)


class _Copies:
    """The nodes that are added to a graph."""

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
        # Nodes that an edge for overlapping leads from need not have ended.
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
        """With what was added."""
        n_added = len(self._nodes) - len(self._captured.nodes)
        return dataclasses.replace(
            self._captured,
            nodes=self._nodes,
            edges=self._edges,
            launches=[*self._captured.launches, *[-1] * n_added],
        )


def _is_slot(program: Program, one: FixedAllocation) -> bool:
    return one.value is not None and program.values[one.value].role in (Role.INPUT, Role.OUTPUT)
