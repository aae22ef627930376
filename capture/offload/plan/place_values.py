"""Places a Program's Values in slots, and its activations in one feature map."""

from __future__ import annotations

from collections.abc import Sequence, Set

from offload.plan.lifetimes import value_lifetimes
from offload.plan.memory import Placement, round_up
from offload.plan.place_lifetimes import place_lifetimes
from offload.plan.plan import Lifetime, Place, Plan, Slot, SlotKind
from offload.plan.topology import Machine
from offload.program import PLACED_ROLES, Program, Role, Value

_SLOT_OF_ROLE = {
    Role.INPUT: SlotKind.INPUT,
    Role.OUTPUT: SlotKind.OUTPUT,
    Role.WEIGHT: SlotKind.WEIGHT,
}


def place_values(
    program: Program,
    machine: Machine,
    operator_allocated: Set[int] = frozenset(),
    lifetimes: Sequence[Lifetime] | None = None,
) -> Plan:
    """Plan the memory of a Program.

    Args:
        program: the Program to place.
        machine: gives the alignment.
        operator_allocated: activations whose operator can only return its own memory; each gets its
            own slot instead of a place in the feature map.
        lifetimes: the live range of each Value; by default counted in launches, which run one after
            another.

    Returns:
        A Plan in which every activation and scratch Value lies in the feature map for exactly its
        lifetime, every input, output and weight at the base of its own slot, and all derived Values
        in one slot. Host constants have no place. The same program gives the same Plan.
    """
    lifetimes = value_lifetimes(program) if lifetimes is None else tuple(lifetimes)
    shared = [
        value
        for value in program.values
        if value.role in PLACED_ROLES
        and value.index not in operator_allocated
        and not lifetimes[value.index].is_empty
    ]
    placement = place_lifetimes(
        [lifetimes[value.index] for value in shared],
        [value.size_bytes for value in shared],
        alignment_bytes=machine.alignment_bytes,
    )
    slots, places = _slots_and_places(
        program, shared, placement, operator_allocated, machine.alignment_bytes
    )
    return Plan(
        slots=slots,
        places=places,
        lifetimes=lifetimes,
        alignment_bytes=machine.alignment_bytes,
        feature_map_bytes=placement.arena_bytes,
        lower_bound_bytes=placement.lower_bound_bytes,
        unshared_bytes=sum(_aligned(value.size_bytes, machine) for value in shared),
        method=placement.method,
        n_launches=len(program.launches),
    )


def _slots_and_places(
    program: Program,
    shared: list[Value],
    placement: Placement,
    operator_allocated: Set[int],
    alignment_bytes: int,
) -> tuple[tuple[Slot, ...], tuple[Place | None, ...]]:
    """A slot for each input, output, weight and operator-allocated Value, and one for the rest."""
    slots: list[Slot] = []
    places: list[Place | None] = [None] * len(program.values)

    def add_slot(kind: SlotKind, size_bytes: int, name: str) -> int:
        slots.append(Slot(len(slots), kind, size_bytes, name))
        return len(slots) - 1

    for role, kind in _SLOT_OF_ROLE.items():
        for value in program.of_role(role):
            if value.on_host:
                continue
            places[value.index] = Place(add_slot(kind, value.size_bytes, value.name), 0)
    feature_map = add_slot(SlotKind.FEATURE_MAP, placement.arena_bytes, "feature map")
    for value, offset_bytes in zip(shared, placement.offsets_bytes, strict=True):
        places[value.index] = Place(feature_map, offset_bytes)
    for index in sorted(operator_allocated):
        value = program.values[index]
        if value.role is Role.ACTIVATION:
            places[index] = Place(add_slot(SlotKind.OPERATOR, value.size_bytes, value.name), 0)
    derived = program.of_role(Role.DERIVED)
    end_bytes = 0
    for value in derived:
        places[value.index] = Place(len(slots), end_bytes)
        end_bytes += round_up(value.size_bytes, alignment_bytes)
    if derived:
        add_slot(SlotKind.DERIVED, end_bytes, "derived from weights")
    return tuple(slots), tuple(places)


def _aligned(size_bytes: int, machine: Machine) -> int:
    return round_up(size_bytes, machine.alignment_bytes)
