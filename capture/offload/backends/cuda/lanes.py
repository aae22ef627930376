"""Runs independent launches of a captured graph concurrently: the same nodes, with fewer edges.

A capture records one stream, so its graph is a chain. Its clone gets the edges that lanes of
launches need (`plan.node_order`). They are then read back from the driver, and the Plan is checked
against these.

A library's workspace is memory that launches share although no Value represents it. torch keeps one
for each handle of cuBLAS and each stream (`getCUDABlasLtWorkspace` and `workspaces()` in
ATen/cuda/CublasHandlePool.cpp), since kernels of two streams must not use one concurrently. So
launches that name the same workspace keep their order, unless each lane has its own: the words of a
lane's launches then refer to another scratch Value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

from offload.backends.captured.relocation.captures import GraphCapture
from offload.backends.captured.relocation.touches import node_graph, with_scratch
from offload.backends.captured.relocation.words import Word
from offload.backends.cuda.driver import call, driver_bindings
from offload.backends.cuda.graph import set_edges
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.resident_graph import TemplateGraph
from offload.backends.cuda.twins import time_graphs
from offload.backends.loaded import Prepared
from offload.plan import NodeGraph, Plan
from offload.plan.launch_conflicts import Conflict
from offload.plan.node_order import lane_edges, lane_of_launches, node_conflicts
from offload.plan.steps import Lane
from offload.program import Program, Role

MOST_LANES = 4
"""The most concurrent launches for "auto": an estimate, which measurement then confirms or rejects.
"""

SYNCHRONISATION_NS = 800.0
"""The assumed cost of a wait for a node of another lane: as much as an edge between two kernels,
0.78 to 0.80 us on an H100 (measured by others: tie-pilot-qxw/pytorch, DynaGraph,
dynagraph/docs/notes/TIERS.md). It only determines what is measured.
"""


class CudaLanes:
    """Runs launches on lanes by the edges of their graph; see `LaneRunner`."""

    most_lanes = MOST_LANES
    synchronisation_ns = SYNCHRONISATION_NS

    def __init__(self, proof_memory: Callable[[int], AbstractContextManager[DeviceMemory]]) -> None:
        """Time graphs in memory from `proof_memory` for the device of an index."""
        self._proof_memory = proof_memory

    def refusal(self, prepared: Prepared) -> str:
        """Why a Program's graph cannot be divided into lanes; empty if it can."""
        captured: TemplateGraph = prepared.state
        if captured.fixed.fixed:
            return (
                "some of its memory keeps its address, and no word of a kernel shows which "
                "launches use that memory"
            )
        return ""

    def conflicts(self, prepared: Prepared) -> tuple[Conflict, ...]:
        """The launches that keep their order, without those that only share a workspace."""
        assert prepared.graph is not None
        workspaces = _workspaces(prepared.state, prepared.program, prepared.graph)
        return node_conflicts(prepared.program, prepared.graph, workspaces)

    def in_lanes(self, prepared: Prepared, lanes: Sequence[Lane]) -> Prepared:
        """A prepared Program whose graph has the edges of these lanes, which `conflicts` allow.

        Each lane that uses a workspace, except the first, gets an additional scratch Value.

        Raises:
            PlanError: the lanes do not fit the Program.
            ExecutionError: the driver failed, or its graph has other edges than it was given.
        """
        captured: TemplateGraph = prepared.state
        program, graph = prepared.program, prepared.graph
        assert graph is not None
        workspaces = _workspaces(captured, program, graph)
        lane_of = lane_of_launches(len(program.launches), lanes)
        sizes_bytes, moved = _own_workspaces(program, graph, workspaces, lane_of)
        whole = with_scratch(program, sizes_bytes)
        words = tuple(
            dataclasses.replace(
                one, value=moved.get((one.value, _lane(graph, lane_of, one)), one.value)
            )
            for one in captured.discovery.words
        )
        with DeviceMemory(captured.device):  # for its context
            capture = _with_edges(captured.capture, lane_edges(program, graph, lanes))
        state = dataclasses.replace(
            captured,
            capture=capture,
            discovery=dataclasses.replace(captured.discovery, words=words),
            one_lane=captured,
        )
        return dataclasses.replace(
            prepared,
            bound=dataclasses.replace(prepared.bound, program=whole),
            graph=node_graph(whole, capture, words),
            state=state,
        )

    def time_executions(self, placed: Sequence[tuple[Prepared, Plan]]) -> list[float]:
        """The durations of executions of each on the device, in ns; as `time_graphs`.

        Raises:
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """
        bounds = [prepared.bound for prepared, _ in placed]
        graphs = [(prepared.state, plan) for prepared, plan in placed]
        return time_graphs(bounds, graphs, self._proof_memory)


def _workspaces(captured: TemplateGraph, program: Program, graph: NodeGraph) -> frozenset[int]:
    """Scratch Values of a workspace's size that several launches use: owned by no single launch."""
    size_bytes = captured.capture.workspace_bytes
    return frozenset(
        value.index
        for value in program.values
        if size_bytes
        and value.role is Role.SCRATCH
        and value.size_bytes == size_bytes
        and len({graph.launches[node] for node in graph.touches[value.index]}) > 1
    )


def _own_workspaces(
    program: Program, graph: NodeGraph, workspaces: Set[int], lane_of: Sequence[int]
) -> tuple[list[int], Mapping[tuple[int, int], int]]:
    """The sizes of further workspaces, and the Value of each workspace on each lane."""
    sizes_bytes: list[int] = []
    moved: dict[tuple[int, int], int] = {}
    for value in sorted(workspaces):
        launches = {graph.launches[node] for node in graph.touches[value]} - {-1}
        _, *others = sorted({lane_of[launch] for launch in launches})
        for lane in others:
            moved[value, lane] = len(program.values) + len(sizes_bytes)
            sizes_bytes.append(program.values[value].size_bytes)
    return sizes_bytes, moved


def _lane(graph: NodeGraph, lane_of: Sequence[int], word: Word) -> int:
    launch = graph.launches[word.node]
    return lane_of[launch] if launch >= 0 else -1


class _Clone:
    """A graph that is destroyed with its last reference."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __del__(self) -> None:
        driver_bindings().cuGraphDestroy(self.handle)


def _with_edges(capture: GraphCapture, edges: Sequence[tuple[int, int]]) -> GraphCapture:
    """A capture's clone with other edges; raises ExecutionError as `set_edges`."""
    driver = driver_bindings()
    clone = _Clone(call("cuGraphClone", driver.CUgraph(init_value=capture.graph)))
    nodes = [
        dataclasses.replace(
            one,
            handle=int(
                call(
                    "cuGraphNodeFindInClone",
                    driver.CUgraphNode(init_value=one.handle),
                    clone.handle,
                )
            ),
            overlaps=(),
        )
        for one in capture.nodes
    ]
    handles = [(nodes[one].handle, nodes[other].handle) for one, other in edges]
    set_edges(int(clone.handle), handles)
    keep = (capture.keep, clone)
    return dataclasses.replace(
        capture, graph=int(clone.handle), nodes=nodes, edges=list(edges), keep=keep
    )
