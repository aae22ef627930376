"""The Steps of host stages, against independent arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.plan.host_stages import LaunchCosts, host_stage_lanes, predict_host_stages

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TIMES = st.integers(0, 50_000)
COSTS = st.lists(st.builds(LaunchCosts, TIMES, TIMES, TIMES, TIMES), max_size=12)


def by_recurrence(costs: list[LaunchCosts], n_cores: int) -> float:
    """The end of the last kernel, by the times at which each thread and the device are free."""
    if n_cores == 1:
        threads = {"tile": "all", "memory": "all", "launch": "all"}
    else:
        threads = {"tile": "tile", "memory": "memory", "launch": "launch"}
        if n_cores == 2:
            threads["launch"] = "memory"
    free: dict[object, float] = {}
    for index, one in enumerate(costs):
        handed = 0.0
        for stage, taken in (
            ("tile", one.tile_ns), ("memory", one.memory_ns), ("launch", one.launch_ns),
            ("device", one.kernel_ns),
        ):  # fmt: skip
            thread: object = threads.get(stage, stage)
            if stage == "tile" and n_cores > 3:
                thread = index % (n_cores - 2)
            handed = free[thread] = max(free.get(thread, 0.0), handed) + taken
    return free.get("device", 0.0)


@SLOW
@given(COSTS, st.integers(1, 6))
def test_the_steps_take_what_a_recurrence_says(costs, n_cores):
    found = predict_host_stages(costs, n_cores)
    assert found.total_ns == pytest.approx(by_recurrence(costs, n_cores), abs=1e-3)
    kernels_ns = sum(one.kernel_ns for one in costs)
    assert found.idle_ns == pytest.approx(found.total_ns - kernels_ns, abs=1e-3)


@SLOW
@given(COSTS)
def test_more_cores_are_never_slower_where_handing_over_is_free(costs):
    totals = [predict_host_stages(costs, n_cores).total_ns for n_cores in (1, 2, 3)]
    assert totals[1] <= totals[0] + 1e-3
    assert totals[2] <= totals[1] + 1e-3


def test_the_lanes_are_the_workers_of_the_graph_engine():
    """One core: one lane and the device; three: NORMAL, MEMORY, LAUNCH; five: three NORMAL."""
    assert [len(host_stage_lanes(7, n)) for n in (1, 2, 3, 5)] == [2, 3, 4, 6]


def test_an_even_pipeline_hides_all_but_the_slowest_stage():
    """Tiling is the longest stage: the device waits for it alone, except at the beginning."""
    costs = [LaunchCosts(30.0, 5.0, 10.0, 20.0)] * 100
    assert predict_host_stages(costs, 1).total_ns == 100 * 45.0 + 20.0
    assert predict_host_stages(costs, 3).total_ns == 100 * 30.0 + 5.0 + 10.0 + 20.0


def test_no_core_is_refused():
    with pytest.raises(PlanError, match="expected at least 1, got 0"):
        host_stage_lanes(3, 0)
