"""Placements of tasks that the checker has passed, for each objective."""

import dataclasses

from offload.plan.check_task_placement import check_task_placement
from offload.plan.task_placement import place_tasks

OBJECTIVES = [{}, {"objective": "throughput"}, {"objective": "energy", "max_slowdown": 1.3}]


def place(graph, **options):
    """Return a placement that the checker has passed."""
    found = place_tasks(graph, **options)
    check_task_placement(found)
    return found


def with_watts(graph, watts):
    """Return the graph with (busy, idle) watts for each processor."""
    processors = [
        dataclasses.replace(one, busy_watts=busy, idle_watts=idle)
        for one, (busy, idle) in zip(graph.processors, watts, strict=True)
    ]
    return dataclasses.replace(graph, processors=tuple(processors))
