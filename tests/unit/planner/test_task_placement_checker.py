"""Placements of generated graphs, and the checker's rejection of changed ones."""

import dataclasses
import itertools

import pytest
from checked_placements import OBJECTIVES, place, with_watts
from hypothesis import given, settings
from hypothesis import strategies as st
from task_graphs import (
    every_assignment,
    graph_of,
    times_of,
)

from offload.errors import PlanError
from offload.plan.check_task_placement import check_task_placement
from offload.plan.task_graph import Edge
from offload.plan.task_placement import Objective
from offload.plan.topology import Link


@st.composite
def graphs(draw):
    n_tasks = draw(st.integers(1, 9))
    n_processors = draw(st.integers(1, 4))
    cost = st.one_of(st.integers(0, 50), st.none()) if draw(st.booleans()) else st.integers(0, 50)
    costs = []
    for _ in range(n_tasks):
        row = draw(st.lists(cost, min_size=n_processors, max_size=n_processors))
        costs.append(tuple(row) if any(one is not None for one in row) else (7,) * n_processors)
    pairs = list(itertools.combinations(range(n_tasks), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=14)) if pairs else []
    edges = [(*pair, draw(st.integers(0, 60))) for pair in chosen]
    memory = [draw(st.integers(0, 9)) for _ in range(n_tasks)]
    limits = [draw(st.one_of(st.none(), st.integers(9, 40))) for _ in range(n_processors)]
    link = Link(draw(st.sampled_from([1e9, 3e8])), draw(st.sampled_from([0.0, 0.5, 20.0])))
    graph = graph_of(costs, edges, n_processors, memory=memory, limits=limits, link=link)
    watts = [(draw(st.sampled_from([1.0, 2.5, 40.0])), 0.5) for _ in range(n_processors)]
    return with_watts(graph, watts)


def place_or_none(graph, **options):
    """None where it is proved that the memory does not suffice."""
    try:
        return place(graph, max_evaluations=300, **options)
    except PlanError as error:
        if "memory: the tasks do not fit, on whichever processors they run" in str(error):
            return None
        raise


@settings(deadline=None, max_examples=60)
@given(graphs(), st.sampled_from(OBJECTIVES))
def test_never_worse_than_one_processor(graph, options):
    found = place_or_none(graph, **options)
    if found is None:
        assert not any(True for _ in itertools.islice(every_assignment(graph), 1))
        return
    order = found.order()
    assert sorted(order) == list(range(len(graph.tasks)))
    for processor in range(len(graph.processors)):
        chosen = (processor,) * len(graph.tasks)
        total = sum(one.memory_bytes for one in graph.tasks)
        limit = graph.processors[processor].memory_bytes
        if any(one.costs_ns[processor] is None for one in graph.tasks):
            continue
        if limit is not None and total > limit:
            continue
        latency, energy = times_of(graph, chosen, order)
        if found.objective is Objective.LATENCY:
            assert found.latency_ns <= latency
        elif found.objective is Objective.THROUGHPUT:
            assert found.period_ns <= latency
        elif latency <= found.latency_limit_ns:
            assert found.energy_nj <= energy * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(graphs(), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_other_numbers_of_tasks_are_as_valid(graph, options, draw):
    new = list(range(len(graph.tasks)))
    draw.shuffle(new)
    tasks = [None] * len(new)
    for old, task in enumerate(graph.tasks):
        tasks[new[old]] = task
    edges = [Edge(new[one.producer], new[one.consumer], one.size_bytes) for one in graph.edges]
    draw.shuffle(edges)
    renumbered = dataclasses.replace(graph, tasks=tuple(tasks), edges=tuple(edges))
    assert (place_or_none(graph, **options) is None) == (
        place_or_none(renumbered, **options) is None
    )


@settings(deadline=None, max_examples=60)
@given(graphs(), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_the_checker_rejects_what_was_changed(graph, options, draw):
    found = place_or_none(graph, **options)
    if found is None:
        return
    task = draw.randrange(len(graph.tasks))

    def changed(name, value):
        column = list(getattr(found, name))
        column[task] = value
        return dataclasses.replace(found, **{name: tuple(column)})

    wrong = [
        changed("end_ns", found.end_ns[task] + 1),
        changed("begin_ns", found.begin_ns[task] - 1),
        changed("processors", len(graph.processors)),
        changed("processors", -1),
        dataclasses.replace(found, latency_ns=found.latency_ns + 1),
        dataclasses.replace(found, period_ns=found.period_ns + 1),
        dataclasses.replace(found, energy_nj=found.energy_nj * 1.01 + 1),
        dataclasses.replace(found, lower_bound=found.value * 1.01 + 1),
        dataclasses.replace(found, processors=found.processors[1:]),
    ]
    if found.latency_limit_ns is not None:
        wrong.append(dataclasses.replace(found, latency_limit_ns=found.latency_ns - 1))
    for one in wrong:
        with pytest.raises(PlanError):
            check_task_placement(one)


def test_the_checker_rejects_each_kind_of_mistake():
    graph = graph_of([(10, 20), (10, 20), (10, 20)], [(0, 1, 15)], memory=[4, 4, 4], limits=[9, 9])
    found = place(graph)

    def rejected(match, processors, begins):
        ends = [
            b + graph.tasks[t].costs_ns[p]
            for t, (p, b) in enumerate(zip(processors, begins, strict=True))
        ]
        one = dataclasses.replace(
            found, processors=processors, begin_ns=begins, end_ns=tuple(ends), latency_ns=max(ends)
        )
        with pytest.raises(PlanError, match=match):
            check_task_placement(one)

    rejected("begins at 5 ns, and what it reads", (0, 0, 1), (0, 5, 0))
    rejected(
        "begins at 24 ns, and what it reads of task 0 .T1. is there at 25", (0, 1, 0), (0, 24, 10)
    )
    rejected("which runs task 0", (0, 1, 0), (0, 30, 9))
    rejected("12 bytes of 9", (0, 0, 0), (0, 10, 20))
