"""Plans: where every Value of a Program lies. Never an address."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from offload.errors import PlanError
from offload.plan.memory import Interval, check_placement
from offload.plan.streaming import Streaming
from offload.program import PLACED_ROLES, Program


class SlotKind(enum.StrEnum):
    """What kind of allocation a Slot stands for; the order is the order of slots in a Plan."""

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
        kind: who allocates: the caller (input, output, weight), the arena (feature_map), the
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
    """The steps between which a Value must exist: from `first` up to and without `last`."""

    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class NodeGraph:
    """What a device runs in place of a sequence of launches, and who touches what.

    Attributes:
        n_nodes: nodes are numbered from 0 in any order.
        edges: `(before, after)`: the second begins when the first has ended.
        touches: for each Value of the Program the nodes that may read or write it.
        overlapping: those edges whose second node may begin before the first has ended, and waits
            by itself before it touches what an allocator gives in the order of launches. What it
            only reads, as weights, it may read before.
    """

    n_nodes: int
    edges: tuple[tuple[int, int], ...]
    touches: tuple[tuple[int, ...], ...]
    overlapping: frozenset[tuple[int, int]] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The placement of a Program on a Machine.

    Attributes:
        slots: inputs, outputs, weights, the feature map (always one), operator-allocated Values,
            derived Values (one or none).
        places: for each Value of the Program where it lies; None for a Value that nothing uses,
            and for a host constant, whose address no launch knows.
        lifetimes: for each Value when it must exist, counted in launches, or where the device
            runs a graph in that graph's segments (`graph_lifetimes`).
        alignment_bytes: of every Value in the feature map.
        feature_map_bytes: size of the feature map.
        lower_bound_bytes: the most bytes alive at once; no feature map can be smaller.
        unshared_bytes: what the same Values take without sharing memory.
        method: which ordering or search gave the placement.
        streaming: where weights lie and when they are brought there; None: used where they are.
    """

    slots: tuple[Slot, ...]
    places: tuple[Place | None, ...]
    lifetimes: tuple[Lifetime, ...]
    alignment_bytes: int
    feature_map_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    method: str
    streaming: Streaming | None = None

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
            PlanError: it has no place: nothing uses it, or it is a host constant.
        """
        place = self.places[value]
        if place is None:
            raise PlanError(f"%{value} has no slot: nothing uses it, or it is a host constant")
        return place.slot


def check_plan(program: Program, plan: Plan) -> None:
    """Check a Plan against its Program; every backend runs this before it instantiates.

    Raises:
        PlanError: a used Value has no place, lies outside its slot or off its alignment, an
            input, output or weight lies in the feature map, two Values share bytes of it while both
            exist, or a host constant has a place.
    """
    used = {view.value for launch in program.launches for view in launch.views()}
    used |= {index for launch in program.launches for index in launch.writes}
    used |= {result.view.value for result in program.results}
    used |= {view.value for view in program.inputs}
    for value in program.values:
        place = plan.places[value.index]
        if place is None:
            if value.index in used and not value.on_host:
                raise PlanError(f"%{value.index} ({value.name}) is used but has no place")
            continue
        if value.on_host:
            raise PlanError(f"%{value.index} ({value.name}) is a host constant and has a place")
        slot = plan.slots[place.slot]
        if place.offset_bytes + value.size_bytes > slot.size_bytes or place.offset_bytes < 0:
            raise PlanError(
                f"%{value.index} ({value.name}) covers bytes {place.offset_bytes} to "
                f"{place.offset_bytes + value.size_bytes} of slot {slot.name}, which has "
                f"{slot.size_bytes}"
            )
        if slot.kind is SlotKind.FEATURE_MAP:
            if value.role not in PLACED_ROLES:
                raise PlanError(f"{value.role} %{value.index} ({value.name}) in the feature map")
            if place.offset_bytes % plan.alignment_bytes:
                raise PlanError(
                    f"%{value.index} ({value.name}) at byte {place.offset_bytes} is not aligned to "
                    f"{plan.alignment_bytes}"
                )
    _check_shared(program, plan)


def _check_shared(program: Program, plan: Plan) -> None:
    """No two Values lie at one place of the feature map while both exist."""
    feature_map = plan.feature_map.index
    placed = [
        (value, place)
        for value, place in zip(program.values, plan.places, strict=True)
        if place is not None and place.slot == feature_map
    ]
    intervals = [
        Interval(plan.lifetimes[one.index].first, plan.lifetimes[one.index].last, one.size_bytes)
        for one, _ in placed
    ]
    check_placement(intervals, [place.offset_bytes for _, place in placed])
