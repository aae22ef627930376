"""Graphs of tasks and the processors that could run them: the input of placement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from offload.plan.topology import Link


@dataclasses.dataclass(frozen=True, slots=True)
class Processor:
    """A processor for tasks. It runs one task at a time.

    Attributes:
        name: for the user.
        memory_bytes: the most that its tasks may take together; None: no limit.
        busy_watts, idle_watts: its power while it runs a task, and while it does not.
    """

    name: str
    memory_bytes: int | None = None
    busy_watts: float = 0.0
    idle_watts: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Work that one processor does without a break, such as consecutive launches.

    Attributes:
        name: for the user.
        costs_ns: its duration on each processor; None: that processor cannot run it.
        memory_bytes: the memory of its processor that it takes, whether it runs or not.
    """

    name: str
    costs_ns: tuple[int | None, ...]
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """Data that a task reads from another task. On one processor they are there already.

    Between two processors each edge is a separate transfer, beside tasks and other transfers.

    Attributes:
        producer, consumer: the tasks, by their place in `TaskGraph.tasks`.
        size_bytes: the bytes that are read.
    """

    producer: int
    consumer: int
    size_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks to place. It is not checked before it is placed.

    Attributes:
        tasks: identified by their place here.
        edges: must form no cycle.
        processors: identified by their place here.
        links: the cost of transfers from one processor to another; for all pairs, if anything is
            transferred. Their `row_overhead_ns` is not read.
    """

    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    processors: tuple[Processor, ...]
    links: Mapping[tuple[int, int], Link] = dataclasses.field(default_factory=dict)

    def transfer_ns(self, edge: Edge, origin: int, target: int) -> int:
        """The transfer time of an edge between two processors, in whole ns; 0 on one processor."""
        if origin == target:
            return 0
        link = self.links[origin, target]
        return math.ceil(link.overhead_ns + edge.size_bytes * 1e9 / link.bytes_per_second)

    def cost_ns(self, task: int, processor: int) -> int:
        """The duration of a task on a processor that can run it."""
        cost_ns = self.tasks[task].costs_ns[processor]
        assert cost_ns is not None  # only called for placements
        return cost_ns
