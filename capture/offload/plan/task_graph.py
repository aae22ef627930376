"""Graphs of tasks and the processors that could run them: what placement is asked about."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from offload.plan.topology import Link


@dataclasses.dataclass(frozen=True, slots=True)
class Processor:
    """One of the processors that tasks are placed on. It runs one task at a time.

    Attributes:
        name: for people.
        memory_bytes: what its tasks may take together; None: no limit.
        busy_watts, idle_watts: what it takes while it runs a task, and while it does not.
    """

    name: str
    memory_bytes: int | None = None
    busy_watts: float = 0.0
    idle_watts: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Work that one processor does without a break, such as launches in a row.

    Attributes:
        name: for people.
        costs_ns: what it takes on each processor; None: that one cannot run it.
        memory_bytes: what it takes of its processor's memory, whether it runs or not.
    """

    name: str
    costs_ns: tuple[int | None, ...]
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """What a task reads of what another has made. On one processor it is there already.

    Between two processors each edge is a transfer of its own, beside tasks and other transfers.

    Attributes:
        producer, consumer: the tasks, by their place in `TaskGraph.tasks`.
        size_bytes: how much is read.
    """

    producer: int
    consumer: int
    size_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks that are to be placed. Nothing in it is checked before it is placed.

    Attributes:
        tasks: known by their place here.
        edges: must form no cycle.
        processors: known by their place here.
        links: what transfers take, from one processor to another; of all pairs, if anything is
            transferred. Their `row_overhead_ns` is not read.
    """

    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    processors: tuple[Processor, ...]
    links: Mapping[tuple[int, int], Link] = dataclasses.field(default_factory=dict)

    def transfer_ns(self, edge: Edge, origin: int, target: int) -> int:
        """What an edge's bytes take from one processor to another, in whole ns; 0 on one."""
        if origin == target:
            return 0
        link = self.links[origin, target]
        return math.ceil(link.overhead_ns + edge.size_bytes * 1e9 / link.bytes_per_second)

    def cost_ns(self, task: int, processor: int) -> int:
        """What a task takes on a processor that can run it."""
        cost_ns = self.tasks[task].costs_ns[processor]
        assert cost_ns is not None  # asked of a placement alone
        return cost_ns
