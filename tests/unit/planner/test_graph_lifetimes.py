"""Lifetimes on graphs: values that share bytes are ordered, for any graph."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.plan import Lifetime, NodeGraph, graph_lifetimes, place_values
from offload.plan.graph_lifetimes import MOST_CHAINS, node_segments
from offload.plan.topology import CostTable, Machine
from offload.program import Program, Role, Value
from offload.program.structure import Structure

MACHINE = Machine("cuda", "test", 0, 256, CostTable())


def program_of(*values: tuple[Role, int]) -> Program:
    structure = Structure("tuple")
    return Program(
        "cuda",
        tuple(
            Value(index, role, (size,), (1,), "uint8", size, f"v{index}")
            for index, (role, size) in enumerate(values)
        ),
        (),
        (),
        (),
        structure,
        structure,
    )


def test_each_node_of_a_chain_is_a_segment():
    graph = NodeGraph(4, ((0, 1), (1, 2), (2, 3)), ())
    assert node_segments(graph) == [0, 1, 2, 3]


def test_nodes_may_be_numbered_in_any_order():
    graph = NodeGraph(3, ((2, 0), (0, 1)), ())
    assert node_segments(graph) == [1, 2, 0]


def test_branches_between_a_fork_and_a_join_are_one_segment():
    #     1 - 2
    # 0 <       > 4 - 5
    #       3
    graph = NodeGraph(6, ((0, 1), (1, 2), (0, 3), (2, 4), (3, 4), (4, 5)), ())
    assert node_segments(graph) == [0, 1, 1, 1, 2, 3]


def test_a_branch_that_is_never_joined_keeps_everything_beside_it_in_one_segment():
    graph = NodeGraph(4, ((0, 1), (1, 2), (0, 3)), ())
    assert node_segments(graph) == [0, 1, 1, 1]


def test_nodes_without_edges_are_one_segment():
    assert node_segments(NodeGraph(3, (), ())) == [0, 0, 0]
    assert node_segments(NodeGraph(0, (), ())) == []


def test_values_of_the_caller_live_throughout_and_untouched_ones_never():
    program = program_of((Role.INPUT, 8), (Role.ACTIVATION, 8), (Role.SCRATCH, 8), (Role.OUTPUT, 8))
    graph = NodeGraph(3, ((0, 1), (1, 2)), ((0,), (), (1,), (2,)))
    expected = (Lifetime(0, 3), Lifetime(0, 0), Lifetime(1, 2), Lifetime(0, 3))
    assert graph_lifetimes(program, graph) == expected


def test_a_cycle_and_an_unknown_node_are_refused():
    with pytest.raises(PlanError, match="cycle"):
        node_segments(NodeGraph(2, ((0, 1), (1, 0)), ()))
    with pytest.raises(PlanError, match="edge 0 to 2"):
        node_segments(NodeGraph(2, ((0, 2),), ()))


def test_scratch_shares_the_feature_map_with_activations():
    program = program_of((Role.ACTIVATION, 512), (Role.SCRATCH, 512), (Role.ACTIVATION, 512))
    graph = NodeGraph(3, ((0, 1), (1, 2)), ((0,), (1,), (2,)))
    plan = place_values(program, MACHINE, lifetimes=graph_lifetimes(program, graph))
    assert plan.feature_map_bytes == 512
    assert [place.offset_bytes for place in plan.places if place] == [0, 0, 0]
    at_once = NodeGraph(3, (), ((0,), (1,), (2,)))
    plan = place_values(program, MACHINE, lifetimes=graph_lifetimes(program, at_once))
    assert plan.feature_map_bytes == 3 * 512


@st.composite
def graphs(draw: st.DrawFn) -> NodeGraph:
    """A graph with randomly numbered nodes, and the nodes that touch each of some values."""
    n_nodes = draw(st.integers(2, 14))
    names = draw(st.permutations(range(n_nodes)))
    pairs = [(i, j) for j in range(n_nodes) for i in range(j)]
    chain = [(i, i + 1) for i in range(n_nodes - 1) if draw(st.integers(0, 3))]
    edges = {*chain, *draw(st.sets(st.sampled_from(pairs), max_size=2 * n_nodes))}
    touches = draw(
        st.lists(st.sets(st.integers(0, n_nodes - 1), max_size=4), min_size=1, max_size=10)
    )
    return NodeGraph(
        n_nodes,
        tuple((names[i], names[j]) for i, j in sorted(edges)),
        tuple(tuple(sorted(nodes)) for nodes in touches),
    )


def reachable(graph: NodeGraph) -> set[tuple[int, int]]:
    """Every pair of nodes of which the first ends before the second begins."""
    pairs = set(graph.edges)
    for middle in range(graph.n_nodes):
        pairs |= {
            (i, j)
            for i in range(graph.n_nodes)
            for j in range(graph.n_nodes)
            if (i, middle) in pairs and (middle, j) in pairs
        }
    return pairs


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(graphs())
def test_one_lifetime_precedes_another_just_where_the_graph_orders_all_nodes(graph):
    program = program_of(*[(Role.ACTIVATION, 256)] * len(graph.touches))
    lifetimes = graph_lifetimes(program, graph)
    ordered = reachable(graph)
    for nodes, one in zip(graph.touches, lifetimes, strict=True):
        assert one.is_empty == (not nodes)
        for others, other in zip(graph.touches, lifetimes, strict=True):
            if nodes and others:
                assert one.precedes(other) == all((i, j) in ordered for i in nodes for j in others)


def test_branches_share_what_segments_would_keep_apart():
    """Two branches of three nodes each: within each, the first value is gone before the third."""
    edges = ((0, 1), (1, 2), (3, 4), (4, 5))
    graph = NodeGraph(6, edges, ((0, 1), (1, 2), (3, 4), (4, 5), (2,), (5,)))
    program = program_of(*[(Role.ACTIVATION, 512)] * 6)
    lifetimes = graph_lifetimes(program, graph)
    assert lifetimes[0].precedes(lifetimes[4])
    assert not lifetimes[0].precedes(lifetimes[3])
    plan = place_values(program, MACHINE, lifetimes=lifetimes)
    assert plan.feature_map_bytes == 4 * 512


def test_of_too_many_branches_lifetimes_are_counted_in_segments():
    n = MOST_CHAINS + 1
    edges = tuple((node, n) for node in range(n))
    graph = NodeGraph(n + 1, edges, (*((node,) for node in range(n)), (n,)))
    program = program_of(*[(Role.ACTIVATION, 512)] * (n + 1))
    lifetimes = graph_lifetimes(program, graph)
    assert lifetimes == (*[Lifetime(0, 1)] * n, Lifetime(1, 2))
    assert place_values(program, MACHINE, lifetimes=lifetimes).feature_map_bytes == n * 512


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(graphs())
def test_values_that_share_bytes_are_never_unordered(graph):
    program = program_of(*[(Role.ACTIVATION, 256 * (1 + i % 3)) for i in range(len(graph.touches))])
    plan = place_values(program, MACHINE, lifetimes=graph_lifetimes(program, graph))
    ordered = reachable(graph)
    for one in program.values:
        for other in program.values[: one.index]:
            here, there = plan.places[one.index], plan.places[other.index]
            if here is None or there is None:
                continue
            apart = (
                here.offset_bytes + one.size_bytes <= there.offset_bytes
                or there.offset_bytes + other.size_bytes <= here.offset_bytes
            )
            first, second = graph.touches[one.index], graph.touches[other.index]
            assert (
                apart
                or all((i, j) in ordered for i in first for j in second)
                or all((j, i) in ordered for i in first for j in second)
            )


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_a_cut_node_is_a_segment_of_its_own(graph):
    ordered = reachable(graph)
    cuts = {
        node
        for node in range(graph.n_nodes)
        if all(
            node == other or (node, other) in ordered or (other, node) in ordered
            for other in range(graph.n_nodes)
        )
    }
    segments = node_segments(graph)
    for node in cuts:
        assert segments.count(segments[node]) == 1
    assert set(segments) == set(range(max(segments) + 1))
