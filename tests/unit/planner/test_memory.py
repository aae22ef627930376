import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_instances import CHALLENGING, INSTANCES, digest, random_intervals, read_instance
from ortools.sat.python import cp_model

from offload.errors import PlanError
from offload.plan.memory import (
    THOROUGH_SEARCH_STEPS,
    Interval,
    check_placement,
    lower_bound_bytes,
    place_intervals,
)

# 14 bytes are live at once, yet no arena below 15 bytes holds them.
ABOVE_THE_BOUND = [
    Interval(*numbers)
    for numbers in [
        (3, 7, 4),
        (2, 6, 4),
        (1, 5, 2),
        (1, 2, 11),
        (2, 3, 7),
        (5, 6, 5),
        (6, 7, 10),
    ]
]


def intervals_up_to(count, steps=12, size_bytes=40):
    """Lists of intervals, with empty lifetimes and empty values among them."""
    lifetimes = st.tuples(st.integers(0, steps), st.integers(0, steps)).map(sorted)
    one = st.builds(
        lambda lifetime, size: Interval(*lifetime, size), lifetimes, st.integers(0, size_bytes)
    )
    return st.lists(one, max_size=count)


def takes_memory(interval):
    return interval.first < interval.last and interval.size_bytes > 0


def overlapping(intervals, offsets_bytes):
    """The pairs that overlap in time and bytes, by comparing all pairs."""
    placed = [
        (index, one, offset)
        for index, (one, offset) in enumerate(zip(intervals, offsets_bytes, strict=True))
        if takes_memory(one)
    ]
    return {
        (index, other_index)
        for index, one, offset in placed
        for other_index, other, other_offset in placed
        if index < other_index
        and one.first < other.last
        and other.first < one.last
        and offset < other_offset + other.size_bytes
        and other_offset < offset + one.size_bytes
    }


def smallest_arena_bytes(intervals):
    """The optimum by an independent solver."""
    model = cp_model.CpModel()
    horizon = sum(one.size_bytes for one in intervals)
    arena = model.new_int_var(0, horizon, "arena")
    lifetimes, extents = [], []
    for one in filter(takes_memory, intervals):
        offset = model.new_int_var(0, horizon, "")
        lifetimes.append(model.new_fixed_size_interval_var(one.first, one.last - one.first, ""))
        extents.append(model.new_fixed_size_interval_var(offset, one.size_bytes, ""))
        model.add(offset + one.size_bytes <= arena)
    model.add_no_overlap_2d(lifetimes, extents)
    model.minimize(arena)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def lstm_intervals(n_layers, n_steps, hidden_bytes):
    """The activations of an unrolled LSTM, launch by launch."""
    values = []
    n_launches = 0

    def launch(size_bytes, *reads):
        nonlocal n_launches
        for read in reads:
            values[read][1] = n_launches + 1
        values.append([n_launches, n_launches + 1, size_bytes])
        n_launches += 1
        return len(values) - 1

    sequence = [launch(hidden_bytes // 2) for _ in range(n_steps)]
    for _ in range(n_layers):
        hidden, cell = launch(hidden_bytes), launch(hidden_bytes)
        for step, x in enumerate(sequence):
            from_x = launch(4 * hidden_bytes, x)
            from_hidden = launch(4 * hidden_bytes, hidden)
            gates = launch(4 * hidden_bytes, from_x, from_hidden)
            take, forget, new, give = (launch(hidden_bytes, gates) for _ in range(4))
            kept = launch(hidden_bytes, forget, cell)
            taken = launch(hidden_bytes, take, new)
            cell = launch(hidden_bytes, kept, taken)
            squashed = launch(hidden_bytes, cell)
            hidden = launch(hidden_bytes, give, squashed)
            sequence[step] = hidden
    launch(n_steps * hidden_bytes, *sequence)
    return [Interval(*value) for value in values]


@given(intervals_up_to(40), st.sampled_from([1, 2, 16, 64]))
def test_placement_is_valid(intervals, alignment_bytes):
    placement = place_intervals(intervals, alignment_bytes=alignment_bytes)
    assert not overlapping(intervals, placement.offsets_bytes)
    assert all(offset % alignment_bytes == 0 for offset in placement.offsets_bytes)
    ends = [
        offset + -(-one.size_bytes // alignment_bytes) * alignment_bytes
        for one, offset in zip(intervals, placement.offsets_bytes, strict=True)
        if takes_memory(one)
    ]
    assert placement.arena_bytes == max(ends, default=0)
    assert placement.arena_bytes >= placement.lower_bound_bytes
    assert placement.lower_bound_bytes == lower_bound_bytes(intervals, alignment_bytes)


@given(intervals_up_to(40), st.sampled_from([1, 8]))
def test_lower_bound_is_the_fullest_step(intervals, alignment_bytes):
    def live_bytes(step):
        return sum(
            -(-one.size_bytes // alignment_bytes) * alignment_bytes
            for one in intervals
            if one.first <= step < one.last
        )

    assert lower_bound_bytes(intervals, alignment_bytes) == max(map(live_bytes, range(13)))


@given(intervals_up_to(8, steps=8, size_bytes=12))
@example(ABOVE_THE_BOUND)
@settings(deadline=None)
def test_few_values_are_placed_optimally(intervals):
    assert place_intervals(intervals).arena_bytes == smallest_arena_bytes(intervals)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 6)), max_size=8))
@settings(deadline=None)
def test_search_proves_what_the_solver_proves(numbers):
    # One-step values fill every step up to the fullest, so that no space is wasted.
    intervals = [Interval(first, first + steps, size) for first, steps, size in numbers]
    bound = lower_bound_bytes(intervals)
    for step in range(7):
        live_bytes = sum(one.size_bytes for one in intervals if one.first <= step < one.last)
        intervals.append(Interval(step, step + 1, bound - live_bytes))
    assert place_intervals(intervals).arena_bytes == smallest_arena_bytes(intervals)


@given(intervals_up_to(30), st.data())
def test_checker_agrees_with_comparing_every_two(intervals, data):
    offsets_bytes = data.draw(
        st.lists(st.integers(0, 60), min_size=len(intervals), max_size=len(intervals))
    )
    if not overlapping(intervals, offsets_bytes):
        check_placement(intervals, offsets_bytes)
        return
    with pytest.raises(PlanError, match=r"interval \d+ .* and interval \d+ .* overlap"):
        check_placement(intervals, offsets_bytes)


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.stem)
def test_checker_rejects_a_moved_value(path):
    intervals = read_instance(path)
    offsets_bytes = list(place_intervals(intervals, search_steps=0).offsets_bytes)
    check_placement(intervals, offsets_bytes)
    below = min(range(len(intervals)), key=lambda index: (offsets_bytes[index], index))
    above = next(
        index
        for index, one in enumerate(intervals)
        if offsets_bytes[index] > 0
        and one.first < intervals[below].last
        and intervals[below].first < one.last
    )
    offsets_bytes[above] = offsets_bytes[below]
    with pytest.raises(PlanError, match="overlap"):
        check_placement(intervals, offsets_bytes)


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.stem)
def test_greedy_portfolio_stays_close_to_the_bound(path):
    intervals = read_instance(path)
    placement = place_intervals(intervals, search_steps=0)
    assert placement.steps == 0
    assert not overlapping(intervals, placement.offsets_bytes)
    assert placement.lower_bound_bytes <= placement.arena_bytes
    assert placement.arena_bytes <= 1.42 * placement.lower_bound_bytes


def test_small_example_meets_its_capacity():
    intervals = read_instance(INSTANCES[-1])
    assert len(intervals) == 5
    assert place_intervals(intervals).arena_bytes == 12


@pytest.mark.parametrize("path", CHALLENGING, ids=lambda path: path.stem)
def test_search_meets_the_capacity(path):
    intervals = read_instance(path)
    placement = place_intervals(
        intervals, capacity_bytes=1_048_576, search_steps=THOROUGH_SEARCH_STEPS
    )
    assert placement.method == "search"
    assert placement.lower_bound_bytes <= placement.arena_bytes <= 1_048_576
    assert not overlapping(intervals, placement.offsets_bytes)


@pytest.mark.parametrize("path", CHALLENGING, ids=lambda path: path.stem)
def test_search_meets_the_bound_in_ordinary_planning(path):
    placement = place_intervals(read_instance(path))
    assert placement.arena_bytes == placement.lower_bound_bytes


def test_unrolled_lstm_is_close_to_the_bound():
    placement = place_intervals(lstm_intervals(2, 16, 512), alignment_bytes=64)
    assert placement.arena_bytes <= 1.02 * placement.lower_bound_bytes


def test_ten_thousand_values():
    intervals = random_intervals(10_000, seed=1)
    placement = place_intervals(intervals, alignment_bytes=64)
    check_placement(intervals, placement.offsets_bytes)
    assert placement.arena_bytes <= 1.02 * placement.lower_bound_bytes


def test_a_capacity_that_is_met_ends_the_search():
    intervals = read_instance(CHALLENGING[0])
    greedy = place_intervals(intervals, search_steps=0)
    enough = place_intervals(intervals, capacity_bytes=greedy.arena_bytes)
    assert (enough.steps, enough.method) == (0, greedy.method)


def test_a_capacity_that_cannot_be_met_gives_the_best():
    placement = place_intervals(ABOVE_THE_BOUND, capacity_bytes=14)
    assert (placement.lower_bound_bytes, placement.arena_bytes) == (14, 15)
    assert place_intervals(ABOVE_THE_BOUND, capacity_bytes=0).arena_bytes == 15


def test_a_search_cut_short_is_never_worse_than_greedy():
    intervals = read_instance(CHALLENGING[-1])
    greedy = place_intervals(intervals, search_steps=0)
    for search_steps in (1, 10_000, 1_000_000):
        placement = place_intervals(intervals, search_steps=search_steps)
        assert placement.arena_bytes <= greedy.arena_bytes


@pytest.mark.slow
def test_same_placement_in_every_process():
    code = "import memory_instances; print(memory_instances.digest())"
    search_path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {digest()}


def test_nothing_to_place():
    placement = place_intervals([Interval(2, 2, 100), Interval(0, 5, 0)])
    assert placement.offsets_bytes == (0, 0)
    assert (placement.arena_bytes, placement.lower_bound_bytes) == (0, 0)
    assert (placement.method, placement.steps) == ("empty", 0)
    assert place_intervals([]).offsets_bytes == ()
    assert lower_bound_bytes([]) == 0
    check_placement([], [])


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        ([Interval(0, 1, 4), Interval(3, 2, 4)], r"interval 1 .* ends before it begins"),
        ([Interval(0, 1, -4)], r"interval 0 .* negative size"),
        ([Interval(0, 1, 2**62), Interval(5, 6, 2**62)], r"add up .* interval 1"),
        ([Interval(0, 1, 2**63)], r"below 2\^63"),
        ([Interval(0, 2**64, 1)], r"below 2\^63"),
    ],
)
def test_bad_intervals_are_refused(intervals, message):
    with pytest.raises(PlanError, match=message):
        place_intervals(intervals)
    with pytest.raises(PlanError, match=message):
        check_placement(intervals, [0] * len(intervals))
    with pytest.raises(PlanError, match=message):
        lower_bound_bytes(intervals)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment_bytes": 0}, "power of two, got 0"),
        ({"alignment_bytes": 48}, "power of two, got 48"),
        ({"capacity_bytes": -1}, "capacity_bytes"),
        ({"search_steps": -1}, "search_steps"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        place_intervals([Interval(0, 1, 4)], **options)


def test_limits_have_no_upper_limit():
    placement = place_intervals(ABOVE_THE_BOUND, capacity_bytes=2**80, search_steps=2**80)
    assert placement.steps == 0
    assert place_intervals(ABOVE_THE_BOUND, search_steps=2**80).arena_bytes == 15


@pytest.mark.parametrize("offsets_bytes", [[0], [0, 0, 0], [0, -4], [0, 2**63 - 1]])
def test_bad_offsets_are_refused(offsets_bytes):
    with pytest.raises(PlanError):
        check_placement([Interval(0, 1, 4), Interval(1, 2, 4)], offsets_bytes)
