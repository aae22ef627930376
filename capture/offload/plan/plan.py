"""Plans: where every Value of a Program lies. Never an address."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from offload.errors import PlanError
from offload.plan.steps import Lane, launch_lane
from offload.plan.streaming import Streaming


class SlotKind(enum.StrEnum):
    """The kind of allocation of a Slot; the order is the order of slots in a Plan."""

    INPUT = "input"
    OUTPUT = "output"
    WEIGHT = "weight"
    FEATURE_MAP = "feature_map"
    OPERATOR = "operator"
    DERIVED = "derived"


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A logical allocation whose base address is known only at an execution.

    Attributes:
        kind: the allocator: the caller (input, output, weight), the arena (feature_map), the
            operator that makes the Value (operator), or the executable for as long as it is open
            (derived: one slot for all).
        size_bytes: bytes that lie at the base address.
        name: for messages and reports.
    """

    index: int
    kind: SlotKind
    size_bytes: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a Value lies: `base[slot] + offset_bytes`."""

    slot: int
    offset_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """The live range of a Value.

    An execution is cut into chains whose steps run in order: the launches of a lane, or nodes of a
    graph of which each follows the one before. A lifetime is over before another begins if in no
    chain its `last` is beyond the other's `first`. With one chain it is an interval.

    Attributes:
        first: the number of steps of the first chain that have ended, whatever the timing, before
            it begins.
        last: the number of them that must have ended for it to be over.
        beside: the same two numbers for each further chain.
    """

    first: int
    last: int
    beside: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no step touches the Value."""
        if self.beside:
            return not any(last for _, last in self.chains)
        return self.last <= self.first

    @property
    def chains(self) -> tuple[tuple[int, int], ...]:
        """First and last by chain."""
        return ((self.first, self.last), *self.beside)

    def precedes(self, other: Lifetime) -> bool:
        """Whether it is over before another, over the same chains, begins."""
        return all(
            last <= first for (_, last), (first, _) in zip(self.chains, other.chains, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class NodeGraph:
    """The graph that a device runs in place of a sequence of launches, with the nodes' accesses.

    Attributes:
        n_nodes: nodes are numbered from 0 in any order.
        edges: `(before, after)`: the second begins when the first has ended.
        touches: for each Value of the Program, the nodes that may read or write it.
        overlapping: edges whose second node may begin before the first has ended, and itself waits
            before it touches memory that an allocator gives in the order of launches. Memory that
            it only reads, such as weights, it may read before.
        launches: for each node the launch that made it, or -1; empty if not requested.
    """

    n_nodes: int
    edges: tuple[tuple[int, int], ...]
    touches: tuple[tuple[int, ...], ...]
    overlapping: frozenset[tuple[int, int]] = frozenset()
    launches: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The placement of a Program on a Machine.

    Attributes:
        slots: inputs, outputs, weights, the feature map (always one), operator-allocated Values,
            derived Values (at most one slot).
        places: for each Value of the Program its place; None for an unused Value, and for a host
            constant, whose address no launch knows.
        lifetimes: for each Value its live range, counted in launches, or where the device runs a
            graph in that graph's nodes (`graph_lifetimes`).
        alignment_bytes: of every Value in the feature map.
        feature_map_bytes: size of the feature map.
        lower_bound_bytes: the most bytes alive at once; no feature map can be smaller.
        unshared_bytes: the size of the same Values without sharing memory.
        method: the ordering or search that gave the placement.
        n_launches: of the Program.
        streaming: where weights lie and when they are copied there; None: they are used in place.
        launch_lanes: the lanes of launches, if an execution has several; on the CPU each launch
            runs on its lane's thread alone. None: one lane, as the device runs it.
        collective_lanes: for a Program with collectives, its launches in order, and beside them a
            lane for each process group (`plan.collective_lanes`). None: no collectives.
    """

    slots: tuple[Slot, ...]
    places: tuple[Place | None, ...]
    lifetimes: tuple[Lifetime, ...]
    alignment_bytes: int
    feature_map_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    method: str
    n_launches: int
    streaming: Streaming | None = None
    launch_lanes: tuple[Lane, ...] | None = None
    collective_lanes: tuple[Lane, ...] | None = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The steps of an execution, lane by lane; the first lane has launches."""
        if self.launch_lanes is not None:
            return self.launch_lanes
        if self.collective_lanes is not None:
            return self.collective_lanes
        if self.streaming is not None:
            return self.streaming.lanes
        return (launch_lane(self.n_launches),)

    def of_kind(self, kind: SlotKind) -> Iterator[Slot]:
        """The slots of one kind, in order."""
        return (slot for slot in self.slots if slot.kind is kind)

    @property
    def feature_map(self) -> Slot:
        """The slot of the feature map."""
        return next(self.of_kind(SlotKind.FEATURE_MAP))

    def slot_of(self, value: int) -> int:
        """The slot in which a Value lies.

        Raises:
            PlanError: it has no place: it is unused, or a host constant.
        """
        place = self.places[value]
        if place is None:
            raise PlanError(f"%{value} has no slot: nothing uses it, or it is a host constant")
        return place.slot
