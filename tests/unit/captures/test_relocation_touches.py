"""The nodes of a captured graph that may touch each Value."""

from __future__ import annotations

import dataclasses

import pytest

from offload.backends.captured.relocation.touches import node_graph, with_scratch
from offload.backends.captured.relocation.words import Word
from offload.backends.cuda import GraphCapture, GraphNode, NodeKind
from offload.plan import Lifetime, check_plan, graph_lifetimes, place_values
from offload.plan.topology import CostTable, Machine
from offload.program import Launch, Operator, Program, Role, Value
from offload.program.structure import Structure

MACHINE = Machine("cuda", "test", 0, 256, CostTable())


def make_program(*touches: tuple[tuple[int, ...], tuple[int, ...]]) -> Program:
    """Four activations of 1 KiB, and launches by what they read and write."""
    values = tuple(
        Value(index, Role.ACTIVATION, (256,), (1,), "float32", 1024, f"v{index}")
        for index in range(4)
    )
    launches = tuple(
        Launch(index, Operator("sim::op"), (), (), reads, writes, False, None, False, "")
        for index, (reads, writes) in enumerate(touches)
    )
    structure = Structure("tuple")
    return Program("cuda", values, launches, (), (), structure, structure)


def chain_of(launches: list[int]) -> GraphCapture:
    """A chain of nodes, by the launch that made each."""
    node = GraphNode(1, NodeKind.KERNEL, "kernel", (), (b"",))
    edges = [(index, index + 1) for index in range(len(launches) - 1)]
    return GraphCapture(1, [node] * len(launches), edges, launches, [], [], None)


def test_all_nodes_of_a_launch_may_touch_what_it_reads_and_writes():
    program = make_program(((0,), (1,)), ((1,), (2,)))
    graph = node_graph(program, chain_of([0, 0, 1]), [])
    assert graph.touches == ((0, 1), (0, 1, 2), (2,), ())
    assert (graph.n_nodes, graph.edges) == (3, ((0, 1), (1, 2)))


def test_kernels_that_may_overlap_are_told():
    capture = chain_of([0, 1, 2])
    late = dataclasses.replace(capture.nodes[2], overlaps=(1,))
    capture = dataclasses.replace(capture, nodes=[*capture.nodes[:2], late])
    graph = node_graph(make_program(((0,), (1,)), ((1,), (2,)), ((2,), (3,))), capture, [])
    assert graph.edges == ((0, 1), (1, 2))
    assert graph.overlapping == {(1, 2)}


def test_a_word_widens_to_the_nodes_of_its_launch():
    program = with_scratch(make_program(((0,), (1,)), ((1,), (2,))), [512, 64])
    words = [Word(1, 0, 0, 4, 0), Word(2, 0, 0, 5, 0), Word(2, 0, 8, 3, 0)]
    graph = node_graph(program, chain_of([0, 0, 1, 1]), words)
    assert graph.touches[3:] == ((2, 3), (0, 1), (2, 3))


def test_a_node_that_no_launch_made_touches_what_its_words_name():
    program = with_scratch(make_program(((0,), (1,))), [512])
    graph = node_graph(program, chain_of([-1, 0, -1]), [Word(2, 0, 0, 4, 0), Word(0, 0, 0, 1, 0)])
    assert graph.touches == ((1,), (0, 1), (), (), (2,))


def test_nodes_of_several_launches_and_of_none_are_told_in_order():
    program = make_program(((0,), (1,)), ((1,), (2,)))
    graph = node_graph(program, chain_of([1, -1, 0, 1, 0]), [Word(1, 0, 0, 1, 0)])
    assert graph.touches == ((2, 4), (0, 1, 2, 3, 4), (0, 3), ())


def test_values_that_one_launch_touches_share_its_nodes():
    """An opaque launch makes all nodes and touches most Values: they share one list of nodes."""
    program = with_scratch(make_program(((0, 1), (2,))), [512] * 3)
    words = [Word(node, 0, 0, 4 + node % 3, 0) for node in range(10)]
    graph = node_graph(program, chain_of([0] * 10), words)
    assert graph.touches[0] == tuple(range(10))
    assert {id(graph.touches[value]) for value in (0, 1, 2, 4, 5, 6)} == {id(graph.touches[0])}
    lifetimes = graph_lifetimes(program, graph)
    assert lifetimes[:3] == (Lifetime(0, 10),) * 3


def test_scratch_is_placed_among_activations_by_its_own_lifetime():
    program = with_scratch(make_program(((0,), (1,)), ((1,), (2,)), ((2,), (3,))), [1024])
    assert [(v.role, v.size_bytes) for v in program.values[4:]] == [(Role.SCRATCH, 1024)]
    graph = node_graph(program, chain_of([0, 1, 2]), [Word(2, 0, 0, 4, 0)])
    lifetimes = graph_lifetimes(program, graph)
    assert lifetimes[4] == Lifetime(2, 3)
    plan = place_values(program, MACHINE, lifetimes=lifetimes)
    check_plan(program, plan)
    assert plan.feature_map_bytes == 3 * 1024


@pytest.mark.parametrize("launches", [[], [0]])
def test_graphs_of_no_and_one_node(launches):
    program = make_program(((0,), (1,)))
    graph = node_graph(program, chain_of(launches), [])
    expected = [Lifetime(0, len(launches))] * 2 + [Lifetime(0, 0)] * 2
    assert list(graph_lifetimes(program, graph)) == expected
