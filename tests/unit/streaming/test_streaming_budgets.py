"""Budgets of streaming: their floor, what is taken of them, and models that share a block."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming_cases import (
    GRANULE,
    SLOW,
    chain,
    demands,
    demands_and_budgets,
    demands_with_tables,
    floor_of,
    full_of,
    plan,
)

from offload.backends.ascend.torch_memory import TorchMemoryUnit
from offload.errors import PlanError
from offload.plan.streaming import WeightDemand, WeightUse
from offload.plan.topology import Link, MemoryUnit


def test_below_the_floor_the_message_says_what_is_needed():
    demand = chain([8192, 40960, 12288, 100])
    with pytest.raises(PlanError) as raised:
        plan(demand, 40960)
    text = str(raised.value)
    at_floor = plan(demand, 40960 + 256)
    predicted = f"{at_floor.period_ns / 1e6:.3f} ms"
    for part in ("41216", "40960", "weight 1", "256 bytes of weights that stay", predicted):
        assert part in text
    assert at_floor.floor.value == 1


@given(demands())
@SLOW
def test_the_floor_is_the_least_that_any_plan_can_take(demand):
    floor = floor_of(demand)
    stay = {one.value for one in demand.weights if one.stays or one.size_bytes < 4096}
    live, read = (
        max(
            sum(one.size_bytes for one in demand.weights if one.value in stay or is_there(one, at))
            for at in range(len(demand.launch_ns))
        )
        for is_there in (
            lambda one, at: one.launches[0] <= at <= one.launches[-1],  # copied once in a pass
            lambda one, at: at in one.launches,
        )
    )
    assert read <= floor <= full_of(demand)
    if all(len(one.launches) == 1 for one in demand.weights):
        assert read == live <= floor
    found = plan(demand, floor)
    assert found.memory_bytes <= floor
    assert found.period_ns == found.floor.period_ns
    with pytest.raises(PlanError, match="Give a budget"):
        plan(demand, floor - 1)


@given(demands_with_tables(), st.data(), st.booleans())
@SLOW
def test_measured_durations_move_no_floor(demand, data, tails):
    """A budget that has a plan has one at every speed, and weights that fit are resident."""
    durations = st.lists(
        st.floats(0.0, 1e6),
        min_size=len(demand.launch_ns),
        max_size=len(demand.launch_ns),
    )
    other = dataclasses.replace(demand, launch_ns=tuple(data.draw(durations)))
    link = Link(data.draw(st.floats(1e6, 1e12)), data.draw(st.floats(0.0, 1e6)))
    floor = floor_of(demand)
    found = plan(other, floor, link=link, tails=tails)
    assert found.floor.required_bytes == floor >= found.taken_bytes
    assert plan(other, full_of(demand), link=link, tails=tails).is_resident


UNITS = [MemoryUnit(GRANULE), MemoryUnit(32, 32), TorchMemoryUnit(), MemoryUnit(1 << 21)]


@given(st.sampled_from(UNITS), st.integers(0, 1 << 25), st.integers(0, 1 << 22))
def test_what_is_taken_of_a_budget_is_within_it(unit, size_bytes, more_bytes):
    taken = unit.taken_bytes(size_bytes)
    assert taken >= size_bytes
    assert unit.usable_bytes(taken) >= size_bytes
    usable = unit.usable_bytes(taken + more_bytes)
    assert unit.taken_bytes(usable) <= taken + more_bytes
    assert unit.taken_bytes(usable + 1) > taken + more_bytes or not usable
    assert unit.taken_bytes(size_bytes + more_bytes) >= taken


@pytest.mark.parametrize("size_mib", [10, 11, 12, 13, 21])
@pytest.mark.parametrize("more_bytes", [-513, -1, 0, 1, 513])
def test_large_blocks_of_torch_are_within_their_budget(size_mib, more_bytes):
    """Segments begin at 10 MiB, and keep a rest of up to 1 MiB."""
    unit, budget = TorchMemoryUnit(), (size_mib << 20) + more_bytes
    usable = unit.usable_bytes(budget)
    assert unit.taken_bytes(usable) <= budget < unit.taken_bytes(usable + 1)


@given(demands_and_budgets(), st.sampled_from(UNITS), st.booleans())
@SLOW
def test_all_that_the_device_gives_counts(case, unit, tails):
    """The plan is for the usable memory; the floor counts the device memory taken for it."""
    demand, budget = case
    exact = plan(demand, 1 << 40, tails=tails).floor
    required = unit.taken_bytes(exact.required_bytes)
    budget = max(budget, required)
    found = plan(demand, budget, tails=tails, unit=unit)
    assert found.taken_bytes == unit.taken_bytes(found.memory_bytes) <= budget
    assert found.floor.required_bytes == required
    within = plan(demand, unit.usable_bytes(budget), tails=tails)
    assert (found.pieces, found.transfers) == (within.pieces, within.transfers)
    with pytest.raises(PlanError, match=f"at least {required} bytes"):
        plan(demand, required - 1, tails=tails, unit=unit)


def shared_block(sizes_bytes, n_layers, launch_ns=1_000.0):
    """Each layer reads the same weights, by separate launches."""
    n_launches = n_layers * len(sizes_bytes)
    weights = [
        WeightUse(
            index, size_bytes, tuple(range(index, n_launches, len(sizes_bytes))), f"weight {index}"
        )
        for index, size_bytes in enumerate(sizes_bytes)
    ]
    return WeightDemand((launch_ns,) * n_launches, tuple(weights))


def test_the_floor_of_a_block_that_all_layers_share_is_its_largest_weight():
    demand = shared_block([8192, 8192, 32768, 32768], n_layers=6)
    found = plan(demand, floor_of(demand))
    assert found.floor.required_bytes == found.memory_bytes == 32768
    assert found.floor.name == "weight 2"
    assert len(found.transfers) == 4 * 6
    assert found.transfer_bytes == 6 * (2 * 8192 + 2 * 32768)
    assert len({one.memory_offset_bytes for one in found.pieces}) < 4


def test_weights_of_a_shared_block_stay_as_the_budget_grows():
    demand = shared_block([8192, 8192, 32768, 32768], n_layers=6, launch_ns=50_000.0)
    copied = [
        plan(demand, budget).transfer_bytes
        for budget in (32768, 2 * 32768, 2 * 32768 + 8192, full_of(demand))
    ]
    assert copied == sorted(copied, reverse=True)
    assert copied[-1] == 0 < copied[-2]


@pytest.mark.parametrize("n_launches", [4, 8, 20])
def test_what_fits_stays_over_every_link_that_hides_its_copies(n_launches):
    """Where copies hide behind launches, rounding must not make them quicker than none."""
    demand = chain([40960] * n_launches)
    tied = WeightUse(n_launches, 32768, (0, n_launches - 1), "tied")
    launch_ns = tuple(1e5 / (1 + (7 * launch) % 11) for launch in range(n_launches))
    demand = WeightDemand(launch_ns, (*demand.weights, tied))
    copied_bytes = 40960 * n_launches + 2 * 32768
    shares = [0.01 * (1 + one) for one in range(70)]  # of the launches' time
    rates = [copied_bytes / (sum(launch_ns) * share) * 1e9 for share in shares]
    found = [plan(demand, full_of(demand), link=Link(rate, 0.0), tails=False) for rate in rates]
    assert [one.transfer_bytes for one in found] == [0] * len(rates)
    assert all(one.period_ns == one.compute_ns for one in found)


def test_a_tied_weight_makes_room_between_its_readers():
    demand = chain([4096, *[40960] * 6, 4096])
    tied = WeightUse(20, 32768, (0, 7), "tied")
    demand = dataclasses.replace(demand, weights=(*demand.weights, tied))
    found = plan(demand, 40960)
    assert found.floor.required_bytes == 40960  # copied once, it would be 32768 more
    [index] = [at for at, one in enumerate(found.pieces) if one.value == 20]
    assert [one.first_launch for one in found.transfers if one.piece == index] == [0, 7]


def test_who_reads_each_weight_once_has_the_floor_of_one_copy():
    """No plan copies more than once: the ring of single copies holds a launch's weights."""
    demand = chain([8192, 40960, 12288])
    found = plan(demand, floor_of(demand))
    assert len(found.transfers) == len({one.piece for one in found.transfers}) == 3
