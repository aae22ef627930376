"""Slots that are copied instead of updating their nodes, by made-up costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.backends.cuda.copy_costs import fit_copy_costs
from offload.plan import MovingSlot, choose_copied_slots
from offload.plan.topology import CopyCosts
from offload.program import is_dense

COSTS = CopyCosts(set_node_ns=1000, submit_ns=2000, device_ns=1500, device_ns_per_byte=0.5)


def slot(index: int, nodes: range | list[int], size_bytes: int = 1000, n_copies: int = 1):
    return MovingSlot(index, size_bytes, n_copies, frozenset(nodes))


def copied(*slots: MovingSlot, costs: CopyCosts = COSTS) -> set[int]:
    return {one.slot for one in choose_copied_slots(slots, lambda: costs) if one.is_copied}


def not_measured() -> CopyCosts:
    raise AssertionError("nothing is to be measured")


def test_a_copy_pays_from_the_break_even_on():
    """1000 bytes cost 2000 + 1500 + 500 ns, as four nodes do: five nodes cost more."""
    (choice,) = choose_copied_slots([slot(0, range(4))], lambda: COSTS)
    assert (choice.is_copied, choice.n_nodes, choice.break_even_nodes) == (False, 4, 5)
    (choice,) = choose_copied_slots([slot(0, range(5))], lambda: COSTS)
    assert (choice.is_copied, choice.n_nodes, choice.break_even_nodes) == (True, 5, 5)
    assert (choice.set_ns, choice.copy_ns, choice.copied_bytes) == (5000, 4000, 1000)


def test_large_slots_need_more_nodes():
    assert copied(slot(0, range(20), 100_000)) == set()
    assert copied(slot(0, range(60), 100_000)) == {0}


def test_what_is_written_is_copied_twice():
    assert copied(slot(0, range(6), n_copies=2)) == set()
    (choice,) = choose_copied_slots([slot(0, range(9), n_copies=2)], lambda: COSTS)
    assert (choice.is_copied, choice.copied_bytes, choice.break_even_nodes) == (True, 2000, 9)


def test_what_may_not_be_copied_is_not():
    assert choose_copied_slots([slot(0, range(100), n_copies=0)], not_measured) == ()


@pytest.mark.parametrize("slots", [[], [slot(0, [])], [slot(0, [1]), slot(1, [1])]])
def test_nothing_is_measured_where_each_slot_has_one_node_at_most(slots):
    assert choose_copied_slots(slots, not_measured) == ()


def test_a_node_that_another_moving_slot_holds_is_not_spared():
    """Ten kernels read slot 0, and all but three write into slot 1, which cannot be copied."""
    fixed = slot(1, range(7), n_copies=0)
    assert copied(slot(0, range(10)), fixed) == set()
    assert copied(slot(0, range(12)), fixed) == {0}


def test_slots_that_share_their_nodes_are_copied_together():
    """Neither copy alone spares a node."""
    assert copied(slot(0, range(9)), slot(1, range(9))) == {0, 1}
    assert copied(slot(0, range(8)), slot(1, range(8))) == set()


def test_each_slot_that_may_be_copied_has_its_choice():
    slots = [slot(0, range(20)), slot(1, [30]), slot(2, range(40, 50), n_copies=0), slot(3, [])]
    choices = choose_copied_slots(slots, lambda: COSTS)
    assert [(one.slot, one.is_copied) for one in choices] == [(0, True), (1, False)]


def _header_ns(slots: list[MovingSlot], chosen: set[int]) -> float:
    set_nodes = set().union(*(one.nodes for one in slots if one.slot not in chosen))
    copies = sum(
        one.n_copies * COSTS.copy_ns(one.size_bytes) for one in slots if one.slot in chosen
    )
    return len(set_nodes) * COSTS.set_node_ns + copies


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 30)), st.integers(1, 4000), st.integers(0, 2)),
        min_size=1,
        max_size=6,
    )
)
def test_the_choice_is_never_worse_than_none_or_any_slot_more_or_less(given_slots):
    slots = [
        slot(index, sorted(nodes), size, n_copies)
        for index, (nodes, size, n_copies) in enumerate(given_slots)
    ]
    chosen = copied(*slots)
    assert all(slots[index].n_copies for index in chosen)
    cost = _header_ns(slots, chosen)
    assert cost <= _header_ns(slots, set())
    allowed = [one.slot for one in slots if one.n_copies]
    for index in set(allowed) - chosen:
        assert cost <= _header_ns(slots, chosen | {index})


# ---- the costs --------------------------------------------------------------------------------


def test_costs_are_medians_and_a_line():
    sizes = [1 << 12, 1 << 16, 1 << 20]
    device = [(size, 1500 + size * 0.25) for size in sizes for _ in range(3)]
    costs = fit_copy_costs([900.0, 1000.0, 90_000.0], [2000.0, 1.0, 2500.0], device)
    assert (costs.set_node_ns, costs.submit_ns) == (1000, 2000)
    assert costs.device_ns == pytest.approx(1500)
    assert costs.device_ns_per_byte == pytest.approx(0.25)
    assert costs.copy_ns(4000) == pytest.approx(2000 + 1500 + 1000)


@pytest.mark.parametrize("device", [[(4096, 0.0), (8192, 0.0)], [(4096, 900.0), (1 << 20, 800.0)],
                                    [(4096, 10.0), (8192, 1000.0)]])  # fmt: skip
def test_no_cost_is_negative_whatever_the_clock_says(device):
    costs = fit_copy_costs([0.0], [0.0], device)
    assert costs.set_node_ns > 0
    assert min(costs.submit_ns, costs.device_ns, costs.device_ns_per_byte) >= 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), st.randoms())
def test_permuted_contiguous_tensors_are_dense_and_others_are_not(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    strides, reached = [0] * len(shape), 1
    for dim in order:
        strides[dim] = reached
        reached *= shape[dim]
    assert is_dense(shape, tuple(strides))
    for dim, size in enumerate(shape):
        if size > 1:
            for wrong in (0, strides[dim] * 2):
                changed = (*strides[:dim], wrong, *strides[dim + 1 :])
                places = {
                    sum(i * s for i, s in zip(index, changed, strict=True))
                    for index in itertools.product(*map(range, shape))
                }
                assert is_dense(shape, changed) == (places == set(range(reached)))
