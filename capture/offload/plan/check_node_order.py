"""Checks a Plan against the graph that a device runs. Shares no code with any planner.

Nodes that the graph does not order may run concurrently. So if one node writes bytes that another
touches, the graph's edges must order the two: nodes of one Value in recorded order; of two Values
on the same bytes, all nodes of one before all of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from offload.errors import PlanError
from offload.plan.plan import NodeGraph, Plan
from offload.program import PLACED_ROLES, Effect, EffectKind, Program, Role

_ANY = -1
"""The launch of a node that no launch made: it must be ordered with all others."""


def check_node_order(program: Program, plan: Plan, graph: NodeGraph) -> None:
    """Prove that no two nodes that may run concurrently share live bytes, or an effect.

    Args:
        program: including scratch Values.
        plan: only its places are read, not lifetimes and lanes.
        graph: as given to the device, with the launch of each node.

    Raises:
        PlanError: two nodes that must be ordered are not; the message names the launches, and the
            Values or the effect.
    """
    reached = _reached(graph)
    order = _Order(program, graph, reached)
    order.check_strays()
    order.check_launches()
    for value in program.values:
        order.check_value(value.index)
    order.check_shared_inputs()
    _check_shared_bytes(program, plan, graph, reached)


def _reached(graph: NodeGraph) -> list[int]:
    """For each node, as bits, the nodes that begin after its end, whatever the timing.

    An edge that lets kernels overlap orders allocator memory: see `NodeGraph.overlapping`.
    """
    after: list[list[int]] = [[] for _ in range(graph.n_nodes)]
    for one, other in graph.edges:
        after[one].append(other)
    reached = [-1] * graph.n_nodes
    for first in range(graph.n_nodes):
        stack = [first]
        while stack:
            node = stack[-1]
            missing = [one for one in after[node] if reached[one] < 0]
            if reached[node] < 0 and missing:
                if len(stack) > graph.n_nodes:
                    raise PlanError("nodes of the graph wait for one another")
                stack.append(missing[0])
                continue
            bits = 0
            for one in after[node]:
                bits |= reached[one] | 1 << one
            reached[node] = bits
            stack.pop()
    return reached


class _Order:
    """The memory that nodes touch, and the order of nodes."""

    def __init__(self, program: Program, graph: NodeGraph, reached: Sequence[int]) -> None:
        self._program = program
        self._graph = graph
        self._reached = reached
        self._nodes_of: dict[int, list[int]] = {}
        self._makers: dict[int, int] = {}  # by Value, the launch that touches it first
        for one in program.launches:
            for value in (*one.reads, *one.writes):
                self._makers.setdefault(value, one.index)
        for node, launch in enumerate(graph.launches):
            self._nodes_of.setdefault(launch, []).append(node)

    def check_strays(self) -> None:
        """Check that nodes that no launch made are ordered with all others."""
        for stray in self._nodes_of.get(_ANY, ()):
            for node in range(self._graph.n_nodes):
                if node != stray and not (self._follows(stray, node) or self._follows(node, stray)):
                    self._refuse(stray, node, "and what the first one touches is not known")

    def check_launches(self) -> None:
        """Check that launches with a common effect are ordered."""
        touched: dict[Effect, list[tuple[int, bool]]] = {}
        guard, unseen = Effect(EffectKind.GUARD), Effect(EffectKind.UNSEEN)
        for launch in self._program.launches:
            writes = set(launch.effects)
            reads = {unseen}
            if any(self._program.values[one].role not in PLACED_ROLES for one in launch.writes):
                reads.add(guard)
            for effect in writes:
                touched.setdefault(effect, []).append((launch.index, True))
            for effect in reads - writes:
                touched.setdefault(effect, []).append((launch.index, False))
        for effect, users in touched.items():
            for (one, writes_one), (other, writes_other) in itertools.combinations(users, 2):
                if writes_one or writes_other:
                    self._check_pair(one, other, f"and both have the effect {effect.kind}")

    def check_value(self, value: int) -> None:
        """Check that nodes that touch a Value are ordered where one of them writes it."""
        users = sorted({self._graph.launches[node] for node in self._graph.touches[value]})
        users = [one for one in users if one != _ANY]
        writers = {one for one in users if self._writes(one, value)}
        if self._program.values[value].role in PLACED_ROLES:
            writers.add(self._makers.get(value, _ANY))
        name = self._program.values[value].name
        for one, other in itertools.combinations(users, 2):
            if one in writers or other in writers:
                self._check_pair(one, other, f"and both touch {name}")

    def check_shared_inputs(self) -> None:
        """Check the same for two inputs that share memory."""
        for overlap in self._program.overlaps:
            pair = [self._program.inputs[leaf].value for leaf in (overlap.first, overlap.second)]
            users = [{self._graph.launches[node] for node in self._touches(one)} for one in pair]
            for one, other in itertools.product(*users):
                if one == other:
                    continue
                if self._writes(one, pair[0]) or self._writes(other, pair[1]):
                    first, last = sorted((one, other))
                    self._check_pair(first, last, "and touch inputs that share memory")

    def _touches(self, value: int) -> Iterator[int]:
        return (node for node in self._graph.touches[value] if self._graph.launches[node] != _ANY)

    def _writes(self, launch: int, value: int) -> bool:
        one = self._program.launches[launch]
        is_known = value in (*one.reads, *one.writes)
        is_scratch = self._program.values[value].role is Role.SCRATCH
        return value in one.writes or is_scratch or not is_known

    def _check_pair(self, one: int, other: int, why: str) -> None:
        """Check that all nodes of a launch precede all nodes of a later launch."""
        for node, later in itertools.product(
            self._nodes_of.get(one, ()), self._nodes_of.get(other, ())
        ):
            if not self._follows(later, node):
                self._refuse(node, later, why)

    def _follows(self, node: int, other: int) -> bool:
        return bool(self._reached[other] >> node & 1)

    def _refuse(self, one: int, other: int, why: str) -> None:
        raise PlanError(
            f"node {one} of {self._launch_name(one)} and node {other} of "
            f"{self._launch_name(other)} may run at once, {why}"
        )

    def _launch_name(self, node: int) -> str:
        launch = self._graph.launches[node]
        if launch == _ANY:
            return "no launch"
        return f"launch {launch} ({self._program.launches[launch].name})"


def _check_shared_bytes(
    program: Program, plan: Plan, graph: NodeGraph, reached: Sequence[int]
) -> None:
    """Check that of Values on the same bytes, one is over before the other begins."""
    feature_map = plan.feature_map.index
    placed = sorted(
        (place.offset_bytes, place.offset_bytes + value.size_bytes, value.index)
        for value, place in zip(program.values, plan.places, strict=True)
        if place is not None and place.slot == feature_map and value.size_bytes
    )
    nodes: dict[int, int] = {}
    followed: dict[int, int] = {}  # by Value, the nodes after all that touch it
    for _, _, value in placed:
        bits, after = 0, (1 << graph.n_nodes) - 1
        for node in graph.touches[value]:
            bits |= 1 << node
            after &= reached[node]
        nodes[value], followed[value] = bits, after
    for position, (_, end, value) in enumerate(placed):
        for begin, _, other in placed[position + 1 :]:
            if begin >= end:
                break
            if nodes[other] & ~followed[value] and nodes[value] & ~followed[other]:
                raise PlanError(
                    f"%{value} ({program.values[value].name}) and %{other} "
                    f"({program.values[other].name}) lie in the same bytes from {begin} on, and "
                    "nodes that may run at once touch them"
                )
