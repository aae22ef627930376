"""The discovered graph of a Program, and the resident that a Plan makes of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from offload.backends.captured.relocation.captures import GraphCapture, NodeKind, launch_names
from offload.backends.captured.relocation.touches import relocations_of
from offload.backends.captured.relocation.words import WORD_BYTES, Discovery
from offload.backends.captured.streamed_copies import StreamedGraph
from offload.backends.cuda.fixed_memory import FixedMemory
from offload.backends.cuda.memory import with_memory_of_torch
from offload.backends.cuda.random_cells import Cell
from offload.native import _native
from offload.plan import Plan
from offload.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateGraph:
    """The result of `prepare`: the template graph, and the meaning of its words.

    Attributes:
        decoy_address: of memory in the pool that the proof assigns to words that should not be
            read.
        fixed: the graph's own memory, for what cannot be relocated.
        proved: what the latest proof allowed, in sentences for users.
        one_lane: with the captured edges, if this one has fewer; None: these are the captured ones.
        is_known: a single capture has explained its words, as all its kernels were known.
    """

    device: int
    capture: GraphCapture
    pool: _native.DiscoveryPool
    discovery: Discovery
    random_cells: list[Cell]
    decoy_address: int
    fixed: FixedMemory = dataclasses.field(default_factory=FixedMemory)
    proved: list[str] = dataclasses.field(default_factory=list)
    one_lane: TemplateGraph | None = None
    is_known: bool = False


def set_nodes(captured: TemplateGraph, plan: Plan) -> dict[int, set[int]]:
    """The kernels that hold the address of each slot. Copies and memsets are re-set in any case."""
    nodes: dict[int, set[int]] = {}
    for index, slot, _ in relocations_of(captured.discovery, plan):
        node = captured.discovery.words[index].node
        if captured.capture.nodes[node].kind is NodeKind.KERNEL:
            nodes.setdefault(slot, set()).add(node)
    return nodes


def make_resident(
    captured: TemplateGraph,
    program: Program,
    plan: Plan,
    arena: _native.CudaArena,
    arena_bytes: int,
    *,
    stream: _native.CudaWeightStream | None = None,
    streamed: StreamedGraph = StreamedGraph((), ()),  # noqa: B008  (immutable)
    keep: Any = None,
) -> _native.CudaResident:
    """The captured graph, resident: its words placed by the Plan, with copies of weights.

    Memory in the cache of torch's allocator is available to it.

    Args:
        captured: what discovery found of `program`, which `plan` places.
        program: its launches are counted, and named in messages.
        plan: the place of each Value.
        arena: contains the feature map.
        arena_bytes: of the feature map; 0: the caller provides one at each execution.
        stream: the weights, if some are streamed.
        streamed: the positions of their copies among the nodes.
        keep: must live as long as the device executes the graph.

    Raises:
        ExecutionError: the driver failed; if memory ran out, the message gives bytes.
    """
    capture, discovery = captured.capture, captured.discovery
    make = functools.partial(
        _native.CudaResident,
        device=captured.device,
        graph=capture.graph,
        arena=arena,
        arena_bytes=arena_bytes,
        node_handles=[node.handle for node in capture.nodes],
        words=[(word.node, word.part, word.offset_bytes) for word in discovery.words],
        relocations=[  # including addresses before their slot
            (word, slot, offset_bytes % 2**64)
            for word, slot, offset_bytes in relocations_of(discovery, plan)
        ],
        launches=list(capture.launches),
        n_launches=len(program.launches),
        host_tables={
            index: node.parts[1] for index, node in enumerate(capture.nodes) if len(node.parts) > 1
        },
        random_cells=captured.random_cells,
        weights=stream,
        copies=[
            (copy.transfer, copy.after, copy.before, copy.for_next_pass) for copy in streamed.copies
        ],
        ready_after=streamed.ready_after,
        half_words=[
            index for index, word in enumerate(discovery.words) if word.size_bytes < WORD_BYTES
        ],
        launch_names=launch_names(program),
        keep=keep,
    )
    return with_memory_of_torch(make)
