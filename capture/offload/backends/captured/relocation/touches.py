"""The nodes of a captured graph that touch each Value, for planning; the relocations of a Plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from offload.backends.captured.relocation.captures import GraphCapture
from offload.backends.captured.relocation.words import Discovery, Word
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
    """The nodes that may read or write each Value.

    A launch's nodes count together: each of them may touch whatever the launch reads or writes, and
    whatever a word of one of its nodes names, since an address can reach a kernel through memory
    that an earlier node of the same launch has filled.
    """
    # Nodes without a launch stand alone, under numbers that no launch has.
    makers = [
        made_by if made_by >= 0 else -1 - node for node, made_by in enumerate(capture.launches)
    ]
    lists: dict[int, list[int]] = {}
    for node, maker in enumerate(makers):
        lists.setdefault(maker, []).append(node)
    nodes_of = {maker: tuple(nodes) for maker, nodes in lists.items()}
    makers_of: list[set[int]] = [set() for _ in program.values]
    for launch in program.launches:
        if launch.index in nodes_of:
            for index in {*launch.reads, *launch.writes}:
                makers_of[index].add(launch.index)
    for word in words:
        makers_of[word.value].add(makers[word.node])

    def nodes_of_all(makers: set[int]) -> tuple[int, ...]:
        if len(makers) == 1:
            # Shared by all Values of this launch: an opaque launch has all nodes.
            return nodes_of[next(iter(makers))]
        return tuple(sorted(itertools.chain.from_iterable(nodes_of[one] for one in makers)))

    return NodeGraph(
        len(capture.nodes),
        tuple(capture.edges),
        tuple(map(nodes_of_all, makers_of)),
        frozenset(
            (before, after) for after, node in enumerate(capture.nodes) for before in node.overlaps
        ),
        tuple(capture.launches),
    )


def relocations_of(discovery: Discovery, plan: Plan) -> list[tuple[int, int, int]]:
    """For each word the slot and the offset of its Value in the Plan."""
    relocations = []
    for index, word in enumerate(discovery.words):
        place = plan.places[word.value]
        assert place is not None  # a Value that a word names is touched by its node
        offset_bytes = place.offset_bytes + word.value_offset_bytes
        relocations.append((index, place.slot, offset_bytes))
    return relocations
