"""Plans of streaming: what stays, what is copied when, and what that takes."""

import dataclasses
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming_cases import (
    ALIGNMENT,
    GRANULE,
    LINK,
    SLOW,
    Interpreter,
    brute_force_ns,
    chain,
    demands,
    demands_and_budgets,
    floor_of,
    full_of,
    plan,
    reference_period_ns,
)

from decoders import ALIGNMENT_BYTES, GRANULE_BYTES, LLAMA_8B, LLAMA_70B, demand_of
from decoders import LINK as PCIE
from offload.errors import PlanError
from offload.plan import check_streaming, roofline_ns, simulate_streaming, stream_weights
from offload.plan.simulate_streaming import simulate_transfers, transfer_ns
from offload.plan.steps import Transfer
from offload.plan.streaming import WeightDemand, WeightUse
from offload.plan.topology import Link, MemoryLayout


def test_all_resident_when_the_budget_holds_all():
    found = plan(chain([8192, 5000, 100]), 8192 + 5120 + 256)
    assert found.transfers == ()
    assert found.memory_bytes == 8192 + 5120 + 256
    assert found.period_ns == found.compute_ns == 3_000


def test_one_byte_less_streams():
    found = plan(chain([8192, 8192, 8192]), 3 * 8192 - 1, tails=False)
    assert len(found.transfers) == 2
    assert found.memory_bytes == 2 * 8192
    assert found.transfer_bytes == 2 * 8192
    assert found.ring_bytes == 8192


def test_tails_copy_less_than_whole_weights():
    demand = chain([40 * GRANULE] * 12, launch_ns=100.0)
    budget = 11 * 40 * GRANULE
    tails, whole = plan(demand, budget), plan(demand, budget, tails=False)
    assert tails.transfer_bytes < whole.transfer_bytes
    assert tails.period_ns < whole.period_ns
    cut = [one for one in tails.pieces if one.offset_bytes]
    assert cut
    assert all(one.offset_bytes % GRANULE == one.memory_offset_bytes % GRANULE == 0 for one in cut)


def test_tails_are_streamed_where_mapped_memory_is_quick_enough():
    demand = chain([40 * GRANULE] * 12, launch_ns=100.0)
    budget = 11 * 40 * GRANULE
    whole = plan(demand, budget, tails=False)
    for share in (0.25, 0.5, 0.9, 1.0, 2.0):
        slower = dataclasses.replace(LINK, bytes_per_second=LINK.bytes_per_second * share)
        found = plan(demand, budget, mapped_link=slower)
        over_mapped = plan(demand, budget, link=slower)  # all over the slower link
        assert found.period_ns == min(whole.period_ns, over_mapped.period_ns)
        if any(one.offset_bytes for one in found.pieces):
            assert found.link == slower
        else:
            assert found == whole
    assert (
        plan(demand, budget, mapped_link=dataclasses.replace(LINK, bytes_per_second=1.0)) == whole
    )


def test_what_must_stay_stays():
    demand = chain([8192] * 6)
    written = dataclasses.replace(demand.weights[2], stays=True)
    unread = WeightUse(9, 8192, (), "unread", True)
    demand = dataclasses.replace(
        demand, weights=(*demand.weights[:2], written, *demand.weights[3:], unread)
    )
    found = plan(demand, floor_of(demand))
    streamed = {one.value for one in found.pieces if one.streamed}
    assert streamed == {0, 1, 3, 4, 5}
    assert found.floor.resident_bytes == 2 * 8192
    assert found.floor.ring_bytes == 8192


def test_weights_below_a_page_stay():
    demand = chain([8192, 64, 4095, 8192])
    found = plan(demand, floor_of(demand))
    assert {one.value for one in found.pieces if one.streamed} == {0, 3}


def test_a_weight_read_at_both_ends_stays_when_there_is_room():
    demand = chain([8192] * 8)
    tied = WeightUse(20, 8192, (0, 7), "tied")
    demand = dataclasses.replace(demand, weights=(*demand.weights, tied))
    found = plan(demand, 5 * 8192)
    assert not next(one for one in found.pieces if one.value == 20).streamed


def test_of_plans_that_hide_all_copies_the_one_that_copies_least():
    demand = chain([8192] * 8, launch_ns=1e6)
    found = plan(demand, 7 * 8192, tails=False)
    assert found.period_ns == found.compute_ns
    assert found.transfer_bytes == 2 * 8192


def test_no_weights():
    found = plan(WeightDemand((5.0, 6.0), ()), 0)
    assert (found.pieces, found.transfers, found.period_ns) == ((), (), 11)
    assert found.floor.required_bytes == 0


@given(demands_and_budgets(), st.booleans(), st.sampled_from([0.0, 100.0, 5_000.0]))
@SLOW
def test_plans_hold_their_budget_and_what_they_predict(case, tails, overhead_ns):
    demand, budget = case
    link = Link(1e9, overhead_ns)
    found = plan(demand, budget, link=link, tails=tails)
    assert found.memory_bytes <= budget
    assert sum(one.size_bytes for one in found.pieces) == sum(
        one.size_bytes for one in demand.weights
    )
    copied = [copy.piece for lane in found.lanes for copy in lane.copies]
    assert {index for index, one in enumerate(found.pieces) if one.streamed} == set(copied)
    assert found.transfer_bytes == sum(found.pieces[one].size_bytes for one in copied)
    simulated = simulate_streaming(demand, found, link)
    assert simulated.period_ns == pytest.approx(found.period_ns, rel=1e-8, abs=1e-3)
    assert found.roofline_ns == roofline_ns(demand, link, budget)
    assert found.period_ns >= found.roofline_ns * (1 - 1e-9)
    if found.transfers:  # during a launch the link copies at most the ring's size
        beyond_ns = (found.transfer_bytes - found.ring_bytes) / link.bytes_per_second * 1e9
        assert found.period_ns >= (max(demand.launch_ns) + beyond_ns) * (1 - 1e-8)
    assert plan(demand, budget, link=link, tails=tails) == found


@given(demands(), st.data(), st.booleans(), st.sampled_from([0.5, 1.0, 2.0]))
@SLOW
def test_more_budget_is_never_slower(demand, data, tails, share):
    mapped = dataclasses.replace(LINK, bytes_per_second=LINK.bytes_per_second * share)
    budgets = st.integers(floor_of(demand), full_of(demand) + ALIGNMENT)
    less, more = sorted((data.draw(budgets), data.draw(budgets)))
    found = [plan(demand, one, tails=tails, mapped_link=mapped) for one in (less, more)]
    assert found[1].period_ns <= found[0].period_ns
    assert all(one.period_ns >= one.roofline_ns * (1 - 1e-9) for one in found)


UNIT = 2048


"""The unit of sizes and positions, where all positions are tried."""


@st.composite
def few_weights(draw) -> WeightDemand:
    """Weights of a few units, some read by several launches, some first by the same launch."""
    n_launches = draw(st.integers(2, 8))
    launch = st.integers(0, n_launches - 1)
    launch_ns = draw(st.lists(st.integers(0, 20_000), min_size=n_launches, max_size=n_launches))
    weights = []
    for index in range(draw(st.integers(2, 5))):
        readers = draw(st.sets(launch, min_size=1, max_size=draw(st.sampled_from((1, 1, 1, 2)))))
        size_bytes = UNIT * draw(st.integers(2, 5))
        weights.append(WeightUse(index, size_bytes, tuple(sorted(readers)), f"weight {index}"))
    return WeightDemand(tuple(map(float, launch_ns)), tuple(weights))


@pytest.mark.slow
@given(few_weights(), st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_whole_weights_equal_brute_force(demand, data):
    budget = data.draw(st.integers(floor_of(demand), full_of(demand)))
    expected = brute_force_ns(demand, LINK, budget, UNIT)
    found = plan(demand, budget, tails=False)
    if len(found.transfers) == len({one.piece for one in found.transfers}):
        assert found.period_ns == pytest.approx(expected, rel=1e-6)
    else:  # copied more than once, which brute force does not try
        assert found.period_ns <= expected * (1 + 1e-6)


@pytest.mark.parametrize("n_weights", [6, 7, 8])
@pytest.mark.parametrize("seed", range(3))
def test_up_to_eight_weights_equal_brute_force(n_weights, seed):
    draw = random.Random(100 * n_weights + seed)
    sizes = [4096 * draw.choice((1, 1, 1, 2, 3)) for _ in range(n_weights)]
    launch_ns = tuple(float(draw.randrange(12_000)) for _ in sizes)
    demand = dataclasses.replace(chain(sizes), launch_ns=launch_ns)
    budget = draw.randrange(floor_of(demand), floor_of(demand) + 3 * 4096)
    expected = brute_force_ns(demand, LINK, budget, 4096)
    found = plan(demand, budget, tails=False)
    assert found.period_ns == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "n_tokens", "least"),
    [
        (LLAMA_70B, 2048, [0.97, 0.97, 0.97, 0.97, 0.99, 0.99]),
        (LLAMA_70B, 1, [0.97] * 6),
        (LLAMA_8B, 4096, [0.95, 0.95, 0.92, 0.99, 0.99, 0.99]),
        (LLAMA_8B, 1, [0.95, 0.95, 0.95, 0.95, 0.95, 0.92]),
    ],
    ids=["70B prefill", "70B decode", "8B prefill", "8B decode"],
)
def test_decoders_come_near_the_roofline(decoder, n_tokens, least):
    demand = demand_of(decoder, n_tokens)
    weights_bytes = sum(one.size_bytes for one in demand.weights)
    for share, promised in zip([0.15, 0.3, 0.5, 0.7, 0.85, 0.95], least, strict=True):
        found = stream_weights(
            demand,
            MemoryLayout(ALIGNMENT_BYTES, GRANULE_BYTES),
            PCIE,
            int(share * weights_bytes),
            mapped_link=PCIE,
        )
        assert found.roofline_ns / found.period_ns >= promised, share


@given(demands_and_budgets())
@SLOW
def test_the_simulation_equals_a_plain_one(case):
    demand, budget = case
    found = plan(demand, budget)
    n_launches = len(demand.launch_ns)
    transfers = [
        (
            transfer_ns(found.pieces[one.piece].size_bytes, LINK),
            one.first_launch,
            one.after_pass * n_launches + one.after_launch,
        )
        for one in found.transfers
    ]
    expected = reference_period_ns(demand.launch_ns, transfers)
    simulated = simulate_streaming(demand, found, LINK)
    assert simulated.period_ns == pytest.approx(expected, rel=1e-6, abs=1e-3)
    assert sum(simulated.wait_ns) == pytest.approx(
        simulated.period_ns - found.compute_ns, rel=1e-6, abs=1e-2
    )


def test_times_of_a_pass():
    transfers = [Transfer(0, 0, 1, -1), Transfer(1, 1, 0, 0)]  # one place for both
    found = simulate_transfers((3.0, 4.0), transfers, (10, 20), Link(1e9, 0))
    assert found.period_ns == 37
    assert found.copy_begin_ns == (0, 13)
    assert found.copy_end_ns == (10, 33)
    assert found.wait_ns == (10, 20)


def test_what_waits_for_itself_is_refused():
    with pytest.raises(PlanError, match="waits for launch 1 of the same pass"):
        simulate_transfers((1.0, 1.0), [Transfer(0, 1, 1, 0)], (10,), LINK)


@given(demands_and_budgets(), st.booleans(), st.integers(0, 1 << 30))
@SLOW
def test_launches_read_their_weights_at_any_timing(case, tails, seed):
    demand, budget = case
    found = plan(demand, budget, tails=tails)
    check_streaming(demand, found)
    for turn in range(3):
        Interpreter(demand, found, seed + turn).run(n_passes=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": MemoryLayout(3, GRANULE)}, "divides the granule"),
        ({"memory": MemoryLayout(ALIGNMENT, 0)}, "divides the granule"),
        ({"link": Link(0, 0)}, "link"),
        ({"link": Link(1e9, -1)}, "link"),
        ({"mapped_link": Link(bytes_per_second=0.0, overhead_ns=0.0)}, "expected a link"),
        ({"demand": chain([8192], launch_ns=-1.0)}, "time of launch 0"),
        ({"demand": chain([8192], launch_ns=math.nan)}, "time of launch 0"),
        ({"demand": chain([-1])}, "weight 0 has -1 bytes"),
        (
            {"demand": WeightDemand((1.0,), (WeightUse(0, 8192, (), "w"),))},
            "w is read by no launch",
        ),
        (
            {"demand": WeightDemand((1.0,), (WeightUse(0, 8192, (1,), "w"),))},
            "w: expected launches of 1, ascending",
        ),
    ],
)
def test_bad_input_is_refused(changes, message):
    given_ = {
        "demand": chain([8192, 8192]),
        "link": LINK,
        "budget_bytes": 1 << 20,
        "memory": MemoryLayout(ALIGNMENT, GRANULE),
        "mapped_link": LINK,
    }
    with pytest.raises(PlanError, match=message):
        stream_weights(**(given_ | changes))
