"""Chooses the inputs and outputs to copy because many nodes hold their addresses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence, Set

from offload.plan.topology import CopyCosts


@dataclasses.dataclass(frozen=True, slots=True)
class MovingSlot:
    """A slot whose address may change at each execution.

    Attributes:
        slot: its index in the Plan.
        size_bytes: the bytes of one copy of it.
        n_copies: copies in an execution if it is copied: 2 where it is written and must be copied
            back; 0 where it must not be copied.
        nodes: the nodes that are re-set when it moves.
    """

    slot: int
    size_bytes: int
    n_copies: int
    nodes: Set[int]


@dataclasses.dataclass(frozen=True, slots=True)
class SlotChoice:
    """The decision for a slot, and its grounds.

    Attributes:
        slot: its index in the Plan.
        is_copied: copied to or from a buffer whose address stays; else its nodes are re-set.
        n_nodes: nodes that hold its address.
        set_ns: the time to re-set them.
        copied_bytes: the bytes of its copies at each execution.
        copy_ns: the time of these copies.
        break_even_nodes: K, the fewest nodes for which copying it alone is cheaper.
    """

    slot: int
    is_copied: bool
    n_nodes: int
    set_ns: float
    copied_bytes: int
    copy_ns: float
    break_even_nodes: int


def choose_copied_slots(
    slots: Sequence[MovingSlot], measure: Callable[[], CopyCosts]
) -> tuple[SlotChoice, ...]:
    """Choose the cheaper way for each slot, when all of them move.

    A node is spared only if every moving slot that it holds is copied. So slots are chosen in the
    groups that some node holds together: always the group that saves most, until no group saves
    time.

    Args:
        slots: the inputs and outputs.
        measure: called only if some slot that may be copied has more than one node.

    Returns:
        A choice for each slot that may be copied and has nodes; empty where nothing was measured.
    """
    candidates = {one.slot: one for one in slots if one.n_copies and one.nodes}
    if all(len(one.nodes) <= 1 for one in candidates.values()):
        return ()
    costs = measure()
    copied = _cheapest(slots, candidates, costs)
    return tuple(_choice(one, one.slot in copied, costs) for one in candidates.values())


def _copies_ns(one: MovingSlot, costs: CopyCosts) -> float:
    return one.n_copies * costs.copy_ns(one.size_bytes)


def _choice(one: MovingSlot, is_copied: bool, costs: CopyCosts) -> SlotChoice:
    copy_ns = _copies_ns(one, costs)
    return SlotChoice(
        slot=one.slot,
        is_copied=is_copied,
        n_nodes=len(one.nodes),
        set_ns=len(one.nodes) * costs.set_node_ns,
        copied_bytes=one.n_copies * one.size_bytes,
        copy_ns=copy_ns,
        break_even_nodes=int(copy_ns // costs.set_node_ns) + 1,
    )


def _cheapest(
    slots: Sequence[MovingSlot], candidates: dict[int, MovingSlot], costs: CopyCosts
) -> Set[int]:
    holds: dict[int, set[int]] = {}
    for one in slots:
        for node in one.nodes:
            holds.setdefault(node, set()).add(one.slot)
    groups = Counter(frozenset(held) for held in holds.values())
    copied: set[int] = set()
    while True:
        savings = {}
        for group in {one - copied for one in groups}:
            if group and group <= candidates.keys():
                n_spared = sum(
                    count for one, count in groups.items() if one - copied and one - copied <= group
                )
                cost_ns = sum(_copies_ns(candidates[slot], costs) for slot in group)
                savings[group] = n_spared * costs.set_node_ns - cost_ns
        best = max(savings, key=lambda group: (savings[group], sorted(group)), default=frozenset())
        if not best or savings[best] <= 0:
            return copied
        copied |= best
