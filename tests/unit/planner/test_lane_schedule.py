"""Launches on lanes: the fewest waits, steps that the checker passes, and predictions."""

import itertools
import math
import random

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.plan.check_steps import Touch, check_steps
from offload.plan.lane_schedule import schedule_lanes
from offload.plan.steps import Lane, LaneKind, Record, Run, Wait


class ByConflict:
    """Each conflict as a byte that both of its launches write; and whole executions in sequence.

    A launch reads the results of every launch of the preceding execution.
    """

    def __init__(self, n_launches, conflicts):
        self.n_launches = n_launches
        self.bytes_of = [[] for _ in range(n_launches)]
        for index, pair in enumerate(conflicts):
            for launch in pair:
                self.bytes_of[launch].append((index, launch == pair[0]))

    def at_first(self):
        yield Touch("left by -1", 0, self.n_launches, "left", True)

    def of_launch(self, launch, execution):
        yield Touch(f"left by {execution - 1}", 0, self.n_launches, "left", False)
        yield Touch(f"left by {execution}", launch, launch + 1, "left", True)
        for index, is_first in self.bytes_of[launch]:
            content = (index, execution)
            if not is_first:
                yield Touch("arena", index, index + 1, content, False)
            yield Touch("arena", index, index + 1, content, True)

    def of_copy(self, copy, execution):
        raise AssertionError(copy)

    def launch_name(self, launch):
        return f"launch {launch}"

    def copy_name(self, copy):
        raise AssertionError(copy)


def schedule(launch_ns, conflicts, n_lanes, **options):
    """A schedule whose steps the checker has passed."""
    found = schedule_lanes(launch_ns, conflicts, n_lanes, **options)
    check_steps(found.lanes, len(launch_ns), ByConflict(len(launch_ns), conflicts))
    assert found.predicted_ns <= found.sequential_ns * (1 + 1e-12)
    assert found.predicted_ns >= found.lower_bound_ns * (1 - 1e-12)
    return found


def crossing(lane_of, conflicts):
    """Arcs between lanes in the transitive reduction: within an execution, and at its ends."""
    graph = networkx.DiGraph(conflicts)
    graph.add_nodes_from(range(len(lane_of)))
    home = lane_of[0]
    lanes = {lane: [n for n, one in enumerate(lane_of) if one == lane] for lane in set(lane_of)}
    graph.add_nodes_from(["begin", "end"])
    for lane, launches in lanes.items():
        networkx.add_path(graph, [*launches])
        graph.add_edge("begin", launches[0])
        graph.add_edge(launches[-1], "end")
        assert lane_of[launches[0]] == lane
    lane_at = {**dict(enumerate(lane_of)), "begin": home, "end": home}
    reduced = networkx.transitive_reduction(graph)
    found = [arc for arc in reduced.edges if lane_at[arc[0]] != lane_at[arc[1]]]
    at_ends = [arc for arc in found if "begin" in arc or "end" in arc]
    return len(found) - len(at_ends), len(at_ends)


def random_conflicts(n_launches, n_parents, seed, reach=30):
    draw = random.Random(seed)
    found = set()
    for launch in range(1, n_launches):
        for _ in range(draw.randint(0, n_parents)):
            found.add((draw.randrange(max(0, launch - reach), launch), launch))
    return sorted(found)


def test_nothing_to_run():
    found = schedule([], [], 4)
    assert found.lanes == (Lane(LaneKind.LAUNCHES, ()),)
    assert (found.predicted_ns, found.n_waits, found.n_boundary_waits) == (0, 0, 0)


def test_one_lane_is_one_run():
    for n_lanes in (1, 3):
        found = schedule([5.0, 6.0, 7.0], [(0, 1), (1, 2)], n_lanes)
        assert found.lanes == (Lane(LaneKind.LAUNCHES, (Run(0, 3),)),)
        assert (found.predicted_ns, found.n_waits) == (18, 0)
        assert found.method == "one lane"


def test_two_towers():
    conflicts = [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6)]
    found = schedule([10.0] * 6 + [1.0], conflicts, 2)
    assert found.predicted_ns == 31 == pytest.approx(found.lower_bound_ns)
    assert found.n_waits == 1  # at the join; and the other tower waits for the preceding execution
    assert found.n_boundary_waits == 1
    first, second = found.lanes
    assert [one for one in first.steps if isinstance(one, Wait)] == [Wait(0)]
    assert second.steps[0] == Wait(1, age=1)
    assert isinstance(first.steps[-1], Record)


def test_a_synchronisation_that_costs_more_than_it_gains():
    conflicts = [(0, 1), (0, 2), (1, 3), (2, 3)]
    costs = [10.0, 30.0, 30.0, 10.0]
    assert schedule(costs, conflicts, 2, synchronisation_ns=5.0).predicted_ns == 60
    dear = schedule(costs, conflicts, 2, synchronisation_ns=20.0)
    assert (dear.predicted_ns, len(dear.lanes)) == (80, 1)


def test_waits_that_lanes_imply_are_left_out():
    # Launch 3 needs 0 and 2 of the other lane: a wait for the later one is enough.
    conflicts = [(0, 2), (0, 3), (2, 3), (1, 3)]
    found = schedule([10.0, 25.0, 10.0, 5.0], conflicts, 2)
    assert found.lane_of[0] == found.lane_of[2] != found.lane_of[1]
    assert found.n_waits == 1


@pytest.mark.parametrize("n_lanes", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_waits_are_those_of_the_transitive_reduction(seed, n_lanes):
    draw = random.Random(seed)
    conflicts = random_conflicts(120, 3, seed)
    costs = [float(draw.randint(1, 50)) for _ in range(120)]
    found = schedule(costs, conflicts, n_lanes, synchronisation_ns=2.0)
    assert len(set(found.lane_of)) == len(found.lanes) > 1
    assert (found.n_waits, found.n_boundary_waits) == crossing(found.lane_of, conflicts)
    waits = [one for lane in found.lanes for one in lane.steps if isinstance(one, Wait)]
    assert len(waits) == found.n_waits + found.n_boundary_waits
    # No event is recorded without a wait for it.
    records = {one.event for lane in found.lanes for one in lane.steps if isinstance(one, Record)}
    assert records == {one.event for one in waits}
    # A wait for each conflict between lanes would take more.
    plain = sum(found.lane_of[a] != found.lane_of[b] for a, b in conflicts)
    assert found.n_waits < plain


def test_a_wait_that_is_left_out_is_missed():
    conflicts = random_conflicts(40, 2, 5)
    found = schedule([10.0] * 40, conflicts, 3)
    n_tried = 0
    for index, lane in enumerate(found.lanes):
        for at, step in enumerate(lane.steps):
            if isinstance(step, Wait):
                fewer = Lane(lane.kind, lane.steps[:at] + lane.steps[at + 1 :])
                lanes = [*found.lanes[:index], fewer, *found.lanes[index + 1 :]]
                with pytest.raises(PlanError):
                    check_steps(lanes, 40, ByConflict(40, conflicts))
                n_tried += 1
    assert n_tried == found.n_waits + found.n_boundary_waits > 5


def least_ns(launch_ns, conflicts, n_lanes):
    """The least over all lanes, without costs of synchronisation, in recorded order on each."""
    least = math.inf
    for lanes in itertools.product(range(n_lanes), repeat=len(launch_ns)):
        ends, free = [], [0.0] * n_lanes
        for launch, cost in enumerate(launch_ns):
            ready = max((ends[one] for one, other in conflicts if other == launch), default=0.0)
            ends.append(max(ready, free[lanes[launch]]) + cost)
            free[lanes[launch]] = ends[-1]
        least = min(least, max(ends))
    return least


def test_ten_launches_in_all_ways():
    ratios = []
    for seed in range(12):
        draw = random.Random(seed)
        costs = [float(draw.randint(1, 30)) for _ in range(10)]
        conflicts = random_conflicts(10, 2, seed)
        found = schedule(costs, conflicts, 2)
        ratios.append(found.predicted_ns / least_ns(costs, conflicts, 2))
    assert min(ratios) >= 1 - 1e-12
    assert sum(ratios) / len(ratios) <= 1.03
    assert max(ratios) <= 1.10


def test_lanes_that_nothing_orders():
    found = schedule([10.0] * 12, [], 4)
    assert found.predicted_ns == 30
    assert (found.n_waits, found.n_boundary_waits) == (0, 6)  # three lanes begin and end


def test_many_launches():
    conflicts = [(at, at + 1) for at in range(0, 4_998, 2)] + [(0, 4_999)]
    found = schedule_lanes([1.0] * 5_000, conflicts, 64)
    assert found.predicted_ns <= 2 * 5_000 / 64
    assert found == schedule_lanes([1.0] * 5_000, conflicts, 64)


def test_what_is_refused():
    for conflict in [(1, 0), (0, 0), (-1, 1), (0, 2)]:
        with pytest.raises(PlanError, match="and a later one"):
            schedule_lanes([1.0, 1.0], [conflict], 2)
    for cost in (-1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="launch 1: expected a duration"):
            schedule_lanes([1.0, cost], [], 2)
        with pytest.raises(PlanError, match="synchronisation: expected a duration"):
            schedule_lanes([1.0], [], 2, synchronisation_ns=cost)
    for n_lanes in (0, -1, 65):
        with pytest.raises(PlanError, match="1 to 64 lanes"):
            schedule_lanes([1.0], [], n_lanes)
    with pytest.raises(PlanError, match="0 evaluations or more"):
        schedule_lanes([1.0], [], 2, max_evaluations=-1)
    with pytest.raises(PlanError, match="two launches"):
        schedule_lanes([1.0, 1.0], [(0, 2**63)], 2)
    with pytest.raises(PlanError, match="two launches"):
        schedule_lanes([1.0, 1.0, 1.0], [(0, 1, 2)], 2)


@st.composite
def problems(draw):
    n_launches = draw(st.integers(1, 14))
    costs = draw(st.lists(st.integers(0, 20), min_size=n_launches, max_size=n_launches))
    pairs = list(itertools.combinations(range(n_launches), 2))
    conflicts = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20)) if pairs else []
    return (
        list(map(float, costs)),
        conflicts,
        draw(st.integers(1, 5)),
        float(draw(st.integers(0, 6))),
    )


@settings(deadline=None, max_examples=80)
@given(problems())
def test_steps_are_right_and_waits_few(problem):
    costs, conflicts, n_lanes, synchronisation_ns = problem
    found = schedule(costs, conflicts, n_lanes, synchronisation_ns=synchronisation_ns)
    assert (found.n_waits, found.n_boundary_waits) == crossing(found.lane_of, conflicts)
