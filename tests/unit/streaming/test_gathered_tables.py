"""Tables whose rows are gathered: eligible weights, plans, refusals."""

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from streaming_cases import (
    ALIGNMENT,
    GRANULE,
    LINK,
    SLOW,
    Interpreter,
    chain,
    demands_with_tables,
    floor_of,
    full_of,
    plan,
    without_tables,
)

from offload.errors import PlanError
from offload.plan import check_streaming, roofline_ns, simulate_streaming
from offload.plan.gather_tables import LEAST_TABLE_OVER_ROWS, may_be_gathered
from offload.plan.simulate_streaming import gather_ns
from offload.plan.streaming import Gather, WeightDemand, WeightUse
from offload.plan.topology import Link

ROW_BYTES = 256


def with_table(sizes_bytes, n_rows=4, table=0, launch_ns=1_000.0) -> WeightDemand:
    """A chain of which one weight is a table."""
    demand = chain(sizes_bytes, launch_ns)
    weights = list(demand.weights)
    weights[table] = dataclasses.replace(
        weights[table], row_bytes=ROW_BYTES, n_rows=(n_rows,) * len(weights[table].launches)
    )
    return dataclasses.replace(demand, weights=tuple(weights))


def tables_of(found) -> set[int]:
    return {one.value for one in found.gathers}


# ---- the rule -----------------------------------------------------------------------------------


def test_a_table_does_not_set_the_floor():
    demand = with_table([100 * GRANULE, 8192, 12288])
    found = plan(demand, 12288)
    assert found.floor.required_bytes == 12288
    assert found.floor.value == 2
    assert found.gathers == (Gather(0, 0, 4, ROW_BYTES),)
    assert {one.value for one in found.pieces} == {1, 2}
    assert found.gathered_bytes == 4 * ROW_BYTES
    assert found.streamed_bytes == found.transfer_bytes + 4 * ROW_BYTES
    assert floor_of(without_tables(demand)) == 100 * GRANULE


def test_nothing_is_gathered_where_all_weights_fit():
    demand = with_table([100 * GRANULE, 8192])
    found = plan(demand, full_of(demand))
    assert found.is_resident
    assert found.period_ns == found.compute_ns
    less = plan(demand, 100 * GRANULE)
    assert tables_of(less) == {0}
    assert not less.is_resident
    assert less.transfers == ()
    assert less.memory_bytes == 8192
    assert less.period_ns == less.compute_ns + gather_ns(less.gathers[0], LINK)


def test_a_table_of_which_many_rows_are_read_is_a_weight_like_others():
    for n_rows, may in ((16, True), (17, False)):
        demand = with_table([LEAST_TABLE_OVER_ROWS * 16 * ROW_BYTES, 8192], n_rows)
        assert may_be_gathered(demand.weights[0]) is may
        floor_bytes = LEAST_TABLE_OVER_ROWS * 16 * ROW_BYTES
        assert floor_of(demand) == (8192 if may else floor_bytes)


def test_small_tables_and_those_that_must_stay_stay():
    small = with_table([4095, 8192], n_rows=1)
    stays = with_table([100 * GRANULE, 8192])
    weights = (dataclasses.replace(stays.weights[0], stays=True), *stays.weights[1:])
    for demand in (small, dataclasses.replace(stays, weights=weights)):
        assert not may_be_gathered(demand.weights[0])
        assert plan(demand, floor_of(demand)).gathers == ()


def test_rows_that_take_longer_than_the_table_are_gathered_only_where_they_must_be():
    slow_rows = Link(LINK.bytes_per_second, LINK.overhead_ns, row_overhead_ns=1e9)
    demand = with_table([100 * GRANULE, *[8192] * 4], launch_ns=1e6)
    tight = plan(demand, 16384, link=slow_rows)
    assert tables_of(tight) == {0}
    assert tight.period_ns > 4e9
    roomy = plan(demand, 101 * GRANULE, link=slow_rows)
    assert roomy.gathers == ()
    assert roomy.period_ns < 1e7
    assert roomy.floor == tight.floor


def test_tables_are_gathered_from_the_one_that_saves_most():
    demand = with_table([100 * GRANULE, 200 * GRANULE, 8192], n_rows=0, table=1)
    slow = dataclasses.replace(demand.weights[0], row_bytes=ROW_BYTES, n_rows=(50,))
    demand = dataclasses.replace(demand, weights=(slow, *demand.weights[1:]))
    link = Link(LINK.bytes_per_second, LINK.overhead_ns, row_overhead_ns=1e7)
    assert tables_of(plan(demand, floor_of(demand), link=link)) == {0, 1}
    assert tables_of(plan(demand, 105 * GRANULE, link=link)) == {1}


def test_two_launches_that_read_one_table():
    weights = (
        WeightUse(5, 100 * GRANULE, (0, 2), "words", False, ROW_BYTES, (3, 7)),
        WeightUse(6, 8192, (1,), "other"),
    )
    found = plan(WeightDemand((1.0, 1.0, 1.0), weights), 8192)
    assert found.gathers == (Gather(5, 0, 3, ROW_BYTES), Gather(5, 2, 7, ROW_BYTES))
    assert found.gathered_bytes == 10 * ROW_BYTES


def test_the_roofline_counts_rows():
    demand = with_table([100 * GRANULE, 8192], launch_ns=0.0)
    assert roofline_ns(demand, LINK, 8192) == 4 * ROW_BYTES
    assert roofline_ns(without_tables(demand), LINK, 8192) == 100 * GRANULE


# ---- for any demand -----------------------------------------------------------------------------


@given(demands_with_tables(), st.data(), st.booleans(), st.sampled_from([None, 0.0, 9_000.0]))
@SLOW
def test_plans_hold_their_budget_and_what_they_predict(demand, data, tails, row_overhead_ns):
    link = Link(1e9, 100.0, row_overhead_ns)
    floor = plan(demand, 1 << 40, link=link).floor.required_bytes
    budget = data.draw(st.integers(floor, full_of(demand) + ALIGNMENT))
    found = plan(demand, budget, link=link, tails=tails)
    sizes = {one.value: one.size_bytes for one in demand.weights}
    tables = tables_of(found)
    assert found.memory_bytes <= budget
    assert sum(one.size_bytes for one in found.pieces) == sum(
        size_bytes for value, size_bytes in sizes.items() if value not in tables
    )
    assert found.gathered_bytes * LEAST_TABLE_OVER_ROWS <= sum(sizes[value] for value in tables)
    simulated = simulate_streaming(demand, found, link)
    assert simulated.period_ns == pytest.approx(found.period_ns, rel=1e-8, abs=1e-3)
    assert sum(simulated.wait_ns) == pytest.approx(
        found.period_ns - found.compute_ns, rel=1e-6, abs=1e-2
    )
    assert found.roofline_ns <= found.period_ns * (1 + 1e-9)
    assert plan(demand, budget, link=link, tails=tails) == found


@given(demands_with_tables(), st.data(), st.booleans(), st.sampled_from([None, 9_000.0]))
@SLOW
def test_more_budget_is_never_slower(demand, data, tails, row_overhead_ns):
    link = Link(1e9, 100.0, row_overhead_ns)
    budgets = st.integers(floor_of(demand), full_of(demand) + ALIGNMENT)
    less, more = sorted((data.draw(budgets), data.draw(budgets)))
    found = [plan(demand, one, link=link, tails=tails).period_ns for one in (less, more)]
    assert found[1] <= found[0]


@given(demands_with_tables(), st.data())
@SLOW
def test_gathering_is_never_slower_and_needs_no_more(demand, data):
    whole = without_tables(demand)
    assert floor_of(demand) <= floor_of(whole)
    budget = data.draw(st.integers(floor_of(whole), full_of(demand) + ALIGNMENT))
    assert plan(demand, budget).period_ns <= plan(whole, budget).period_ns


@given(demands_with_tables(), st.data(), st.integers(0, 1 << 30))
@SLOW
def test_launches_read_their_other_weights_at_any_timing(demand, data, seed):
    budget = data.draw(st.integers(floor_of(demand), full_of(demand)))
    found = plan(demand, budget)
    assume(found.transfers)
    for turn in range(3):
        Interpreter(demand, found, seed + turn).run(n_passes=4)


# ---- the simulation, the checker, bad input -----------------------------------------------------


def test_a_launch_begins_when_its_rows_have_come():
    demand = with_table([100 * GRANULE, 8192], table=0)
    found = plan(demand, 8192)
    one = simulate_streaming(demand, found, LINK)
    assert one.wait_ns == (4 * (100 + ROW_BYTES), 0)
    assert one.launch_end_ns[0] == 4 * (100 + ROW_BYTES) + 1_000


GOOD = Gather(0, 0, 4, ROW_BYTES)


@pytest.mark.parametrize(
    ("gathers", "message"),
    [
        ((), r"values \[0\] are weights without pieces"),
        ((GOOD, GOOD), "weight 0: expected rows to be gathered"),
        ((dataclasses.replace(GOOD, n_rows=3),), r"\[\(0, 4\)\], got \[\(0, 3\)\]"),
        ((dataclasses.replace(GOOD, launch=1),), r"\[\(0, 4\)\], got \[\(1, 4\)\]"),
        ((dataclasses.replace(GOOD, row_bytes=8),), "rows of 8 bytes are gathered"),
        ((GOOD, Gather(1, 1, 4, ROW_BYTES)), "weight 1: rows of 256 bytes are gathered"),
        ((GOOD, Gather(1, 1, 4, 0)), "weight 1: rows of 0 bytes are gathered"),
        ((GOOD, Gather(7, 1, 4, ROW_BYTES)), "value 7: rows of 256 bytes"),
    ],
)
def test_the_checker_refuses_rows_that_are_not_those_of_the_launches(gathers, message):
    demand = with_table([100 * GRANULE, 8192])
    found = plan(demand, 8192)
    check_streaming(demand, found)
    with pytest.raises(PlanError, match=message):
        check_streaming(demand, dataclasses.replace(found, gathers=gathers))


def test_the_checker_refuses_a_table_that_stays_or_has_pieces():
    demand = with_table([100 * GRANULE, 8192])
    found = plan(demand, 8192)
    weights = (dataclasses.replace(demand.weights[0], stays=True), demand.weights[1])
    with pytest.raises(PlanError, match=r"weight 0: .* must stay"):
        check_streaming(dataclasses.replace(demand, weights=weights), found)
    resident = plan(demand, full_of(demand))
    with pytest.raises(PlanError, match=r"values \[0\] are weights without pieces, or have pieces"):
        check_streaming(demand, dataclasses.replace(resident, gathers=found.gathers))


@pytest.mark.parametrize(("row_bytes", "n_rows"), [(8, ()), (0, (1,)), (8, (1, 2)), (8, (-1,))])
def test_rows_that_do_not_fit_the_launches_are_refused(row_bytes, n_rows):
    weight = WeightUse(0, 8192, (0,), "words", False, row_bytes, n_rows)
    with pytest.raises(PlanError, match="words: expected a number of rows for each of 1 launches"):
        plan(WeightDemand((1.0,), (weight,)), 1 << 20)


def test_a_link_with_no_time_for_a_row_is_refused():
    with pytest.raises(PlanError, match="link"):
        plan(chain([8192]), 1 << 20, link=Link(1e9, 0.0, row_overhead_ns=-1.0))
