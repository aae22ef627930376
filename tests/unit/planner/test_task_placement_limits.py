"""Placement of tasks at its limits: empty and huge graphs, and input that is refused."""

import dataclasses
import itertools
import math
import random

import pytest
from checked_placements import OBJECTIVES, place, with_watts
from task_graphs import (
    BYTE_PER_NS,
    golden,
    graph_of,
    random_graph,
)

from offload.errors import PlanError
from offload.plan.task_graph import Processor, Task, TaskGraph
from offload.plan.task_placement import place_tasks
from offload.plan.topology import Link


@pytest.mark.parametrize("options", OBJECTIVES)
def test_nothing_to_place(options):
    for processors in ((), (Processor("a"),)):
        found = place(TaskGraph((), (), processors), **options)
        assert found.processors == ()
        assert found.value == 0
        assert found.segments() == ()
        assert found.explain().startswith(options.get("objective", "latency"))


@pytest.mark.parametrize("options", OBJECTIVES)
def test_one_processor(options):
    graph = random_graph(30, 5, 2, n_processors=1)
    found = place(graph, **options)
    total_ns = sum(one.costs_ns[0] for one in graph.tasks)
    assert found.latency_ns == found.period_ns == total_ns
    assert found.runners_up() == (None,) * 30
    assert "there is no other processor" in found.explain()


@pytest.mark.parametrize("options", OBJECTIVES)
def test_tasks_that_take_no_time(options):
    graph = graph_of([(0, 0, 0)] * 20, [(at, at + 1, 0) for at in range(19)])
    assert place(graph, **options).latency_ns == 0
    draw = random.Random(1)
    costs = [[draw.choice([0, 0, 5, 9]) for _ in range(3)] for _ in range(30)]
    edges = [
        (a, b, draw.choice([0, 3]))
        for a, b in itertools.combinations(range(30), 2)
        if draw.random() < 0.1
    ]
    place(graph_of(costs, edges), **options)


@pytest.mark.parametrize("options", OBJECTIVES)
def test_huge_costs_are_exact(options):
    huge = 2**53
    costs = [(huge + 1, huge + 3), (huge + 5, huge + 7), (huge + 9, huge - 1), (1, 2)]
    found = place(graph_of(costs, [(0, 1, 1), (0, 2, 3), (1, 3, 1), (2, 3, 1)]), **options)
    assert found.latency_ns > huge
    if not options:
        assert found.latency_ns == (huge + 1) + max(3 + (huge - 1) + 1, huge + 5) + 1
    with pytest.raises(PlanError, match=r"2\^62"):
        place(graph_of([(2**61, 2**61)] * 3, []), **options)


@pytest.mark.parametrize("options", OBJECTIVES)
def test_the_largest_limit_and_seed_are_accepted(options):
    largest = {"max_evaluations": 2**63 - 1, "seed": 2**64 - 1}
    found = place(graph_of([(3,)], []), **largest, **options)
    assert found.latency_ns == 3
    for name, number in largest.items():
        with pytest.raises(PlanError, match=r"below 2\^64 and a limit below 2\^63"):
            place(graph_of([(3,)], []), **{name: number + 1}, **options)


def test_parts_that_are_not_connected():
    found = place(graph_of([(10, 10)] * 8, [(0, 1, 100), (2, 3, 100), (4, 5, 100), (6, 7, 100)]))
    assert found.latency_ns == 40
    assert found.lower_bound == 40


@pytest.mark.parametrize("options", OBJECTIVES)
def test_five_thousand_tasks_side_by_side(options):
    draw = random.Random(3)
    costs = [[draw.randint(100, 1_000) for _ in range(4)] for _ in range(5_000)]
    edges = [(0, task, 10) for task in range(1, 4_999)] + [
        (task, 4_999, 10) for task in range(4_999)
    ]
    found = place(graph_of(costs, edges), max_evaluations=200, **options)
    assert len(set(found.processors)) > 1 or options.get("objective") == "energy"
    if not options:
        assert found.latency_ns <= 1.05 * found.lower_bound
        assert len(found.order()) == 5_000


def test_a_chain_of_five_thousand_tasks():
    draw = random.Random(4)
    costs = [[draw.randint(100, 1_000) for _ in range(2)] for _ in range(5_000)]
    graph = graph_of(costs, [(at, at + 1, 0) for at in range(4_999)])
    found = place(graph, max_evaluations=100)
    assert found.latency_ns == sum(map(min, costs)) == found.lower_bound


def refused(match, graph, **options):
    with pytest.raises(PlanError, match=match):
        place_tasks(graph, **options)


def test_bad_graphs_are_refused():
    pair = [(1, 1), (1, 1)]
    refused("form a cycle", graph_of(pair, [(0, 1, 1), (1, 0, 1)]))
    refused("form a cycle", graph_of(pair, [(1, 1, 1)]))
    refused("edge 0 to 2: there are 2 tasks", graph_of(pair, [(0, 2, 1)]))
    refused("edge -1 to 1: there are 2 tasks", graph_of(pair, [(-1, 1, 1)]))
    refused("negative size", graph_of(pair, [(0, 1, -1)]))
    refused("negative cost: -1 ns", graph_of([(1, -1)], []))
    refused("no processor can run task 1", graph_of([(1, 1), (None, None)], []))
    refused("expected a cost for each of 2 processors, got 1", graph_of([(1,)], [], 2))
    refused("below 2\\^63", graph_of([(2**63, 1)], []))
    refused("whole numbers", graph_of([(1.5, 1)], []))
    refused("negative amount of memory", graph_of([(1, 1)], [], memory=[-5]))
    refused("negative limit", graph_of([(1, 1)], [], limits=[-1, 3]))
    refused("no processor", TaskGraph((Task("a", ()),), (), ()))
    one_way = dataclasses.replace(graph_of(pair, [(0, 1, 1)]), links={(0, 1): BYTE_PER_NS})
    refused("expected a link from P2 to P1", one_way)
    beyond = dataclasses.replace(one_way, links={(0, 2): BYTE_PER_NS})
    refused("a link between processors .0, 2., and there are 2", beyond)
    for link in (Link(0, 0), Link(-1, 0), Link(1e9, -1), Link(math.nan, 0), Link(1e9, math.inf)):
        refused("the link from processor 0 to 1", graph_of(pair, [(0, 1, 1)], link=link))
    for watts in [(-1.0, -2.0), (1.0, 2.0), (math.inf, 0.0), (math.nan, 0.0)]:
        refused("watts", with_watts(graph_of(pair, []), [watts, (0.0, 0.0)]))


def test_memory_that_does_not_suffice_is_refused():
    graph = graph_of([(1, 1)] * 3, [], memory=[6, 6, 6], limits=[10, 10])
    refused("do not fit, on whichever.*18 bytes together, the largest 6.*10, 10", graph)
    graph = graph_of([(1, None)] * 3, [], memory=[6, 6, 6], limits=[10, None])
    refused("do not fit", graph)
    # Proved by counting: 41 tasks where four fit on each of ten; even sizes in odd memories.
    refused("do not fit", graph_of([[1] * 10] * 41, [], memory=[6] * 41, limits=[24] * 10))
    draw = random.Random(7)
    memory = [2 * draw.randint(50, 100) for _ in range(40)]
    limits = [(sum(memory) // 4) | 1] * 2 + [sum(memory) // 4 - 3] * 2
    refused("do not fit", graph_of([[1] * 4] * 40, [], memory=memory, limits=limits))


def test_bad_options_are_refused():
    graph = golden()
    refused("expected one of latency, throughput, energy", graph, objective="speed")
    refused("expected max_slowdown", graph, objective="energy")
    refused("expected max_slowdown", graph, max_slowdown=2.0)
    for slowdown in (0.99, math.nan, math.inf, -1.0):
        refused("slowdown of 1 or more", graph, objective="energy", max_slowdown=slowdown)
    refused("seed", graph, seed=-1)
    refused("limit", graph, max_evaluations=-1)
