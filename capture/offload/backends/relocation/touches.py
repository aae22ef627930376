"""Who touches what in a captured graph, which the planner needs, and what a Plan makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.backends.relocation.captures import GraphCapture
from offload.backends.relocation.words import Discovery, Word
from offload.plan import NodeGraph, Plan
from offload.program import Program, Role, Value


def with_scratch(program: Program, scratch_bytes: Sequence[int]) -> Program:
    """The Program with scratch Values appended, one for each size."""
    first = len(program.values)
    scratch = (
        Value(first + index, Role.SCRATCH, (size,), (1,), "uint8", size, f"scratch {index}")
        for index, size in enumerate(scratch_bytes)
    )
    return dataclasses.replace(program, values=(*program.values, *scratch))


def node_graph(program: Program, capture: GraphCapture, words: Sequence[Word]) -> NodeGraph:
    """Which nodes may read or write each Value.

    A launch's nodes are taken together: whatever the launch reads or writes, and whatever a word of
    one of its nodes names, may be touched by each of them, since an address can reach a kernel
    through memory that an earlier one of the same launch has filled.
    """
    nodes_of: dict[int, list[int]] = {}
    for node, made_by in enumerate(capture.launches):
        nodes_of.setdefault(made_by, []).append(node)
    touches: list[set[int]] = [set() for _ in program.values]
    for launch in program.launches:
        for index in {*launch.reads, *launch.writes}:
            touches[index].update(nodes_of.get(launch.index, ()))
    for node, value in {(word.node, word.value) for word in words}:
        made_by = capture.launches[node]
        touches[value].update((node,) if made_by < 0 else nodes_of[made_by])
    return NodeGraph(
        len(capture.nodes),
        tuple(capture.edges),
        tuple(tuple(sorted(nodes)) for nodes in touches),
        frozenset(
            (before, after) for after, node in enumerate(capture.nodes) for before in node.overlaps
        ),
    )


def relocations_of(discovery: Discovery, plan: Plan) -> list[tuple[int, int, int]]:
    """For each word the slot and the offset that its Value has in the Plan."""
    relocations = []
    for index, word in enumerate(discovery.words):
        place = plan.places[word.value]
        assert place is not None  # who is named by a word is touched by its node
        offset_bytes = place.offset_bytes + word.value_offset_bytes
        relocations.append((index, place.slot, offset_bytes))
    return relocations
