"""The report of a placement: runners-up, segments, the explanation, and the drawing."""

import dataclasses

import pytest
from checked_placements import place, with_watts
from task_graphs import (
    golden,
    graph_of,
    period_of,
    random_graph,
    times_of,
)

from offload.errors import PlanError
from offload.plan.task_graph import Edge, Processor, Task, TaskGraph
from offload.plan.topology import Link


def test_runners_up_are_what_moving_a_task_would_cost():
    graph = random_graph(12, 1, 4)
    for options in ({}, {"objective": "throughput"}):
        found = place(graph, **options)
        for task, runner_up in enumerate(found.runners_up()):
            costs = {}
            for processor in range(3):
                chosen = [*found.processors]
                chosen[task] = processor
                value = (
                    times_of(graph, chosen, found.order())[0]
                    if not options
                    else period_of(graph, chosen)
                )
                costs[processor] = value
            assert costs.pop(found.processors[task]) == found.value
            assert runner_up.value == min(costs.values())
            assert costs[runner_up.processor] == runner_up.value
            assert runner_up.value >= found.value


def test_runners_up_keep_to_the_latency_that_is_allowed():
    graph = with_watts(random_graph(12, 1, 4), [(9.0, 0.0), (5.0, 0.0), (1.0, 0.0)])
    found = place(graph, objective="energy", max_slowdown=1.0)
    assert found.latency_ns <= found.latency_limit_ns
    for task, runner_up in enumerate(found.runners_up()):
        if runner_up is not None:
            chosen = [*found.processors]
            chosen[task] = runner_up.processor
            assert times_of(graph, chosen, found.order())[0] <= found.latency_limit_ns


def test_segments_have_all_tasks_and_begin_at_transfers():
    graph = random_graph(40, 1, 8)
    found = place(graph)
    segments = found.segments()
    assert sorted(task for one in segments for task in one.tasks) == list(range(40))
    crossing = [
        one
        for one in graph.edges
        if found.processors[one.producer] != found.processors[one.consumer]
    ]
    firsts = {one.tasks[0] for one in segments}
    lasts = {one.tasks[-1] for one in segments}
    assert crossing
    assert all(one.consumer in firsts and one.producer in lasts for one in crossing)


def test_groups_must_be_some_of_the_tasks():
    found = place(golden())
    for groups in ([()], [(10,)], [(-1,)]):
        with pytest.raises(PlanError, match="expected a group"):
            found.runners_up_of(groups)


def test_explanation():
    found = place(golden())
    text = found.explain()
    assert text.startswith("latency: 73 ns; no placement has less than ")
    assert "HEFT 80" in text
    assert "PEFT 85" in text
    assert text.count("segment ") == len(found.segments())
    assert text.count("runner-up: on ") == len(found.segments())
    for segment, runner_up in zip(
        found.segments(), found.runners_up_of([one.tasks for one in found.segments()]), strict=True
    ):
        assert runner_up.processor != segment.processor
        assert f"latency would be {runner_up.value:,.0f} ns" in text


def test_dot():
    graph = graph_of([(1, 9), (9, 1)], [(0, 1, 2048)], link=Link(1e12, 0))
    graph = dataclasses.replace(
        graph, tasks=(dataclasses.replace(graph.tasks[0], name='a "b"\\\n'), graph.tasks[1])
    )
    assert place(graph).to_dot().split("\n") == [
        "digraph placement {",
        "  node [shape=box];",
        "  subgraph cluster_0 {",
        '    label="P1";',
        '    t0 [label="a \\"b\\"\\\\\\\\n\\n0 to 1 ns"];',
        "  }",
        "  subgraph cluster_1 {",
        '    label="P2";',
        '    t1 [label="T2\\n4 to 5 ns"];',
        "  }",
        '  t0 -> t1 [label="2.00 KiB\\n3 ns", style=bold];',
        "}",
    ]


def test_tasks_that_must_stay_do_not_hide_the_runner_up_of_the_others():
    graph = TaskGraph(
        tasks=(Task("inputs", (0, None)), Task("one", (5, 9)), Task("other", (5, 9))),
        edges=(Edge(0, 1, 10), Edge(1, 2, 10)),
        processors=(Processor("here"), Processor("there")),
        links={(0, 1): Link(1e9, 1), (1, 0): Link(1e9, 1)},
    )
    text = place(graph).explain()
    assert "besides 1 task that no other processor can run:" in text
    assert "takes 10 ns of work and 0 ns of transfers here, 18 and 11 on there" in text
    assert "runner-up: on there latency would be 29 ns (+190.0%)" in text
    assert "nJ" not in text
