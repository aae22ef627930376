"""Collectives that overlap launches: simulated, and executed on a virtual clock."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from virtual_ranks import VirtualProgram, virtual_program

import offload
from offload.backends import find_backend
from offload.errors import PlanError
from offload.load.options import Options
from offload.load.overlap import _OverlapLoad
from offload.load.ranks import LoadedTogether
from offload.plan.check_plan import check_order
from offload.plan.check_reordering import check_reordering
from offload.plan.collective_lanes import (
    collective_lanes,
    simulate_collectives,
    started_collectives,
)
from offload.plan.overlap_collectives import in_order, lower_bound_ns, overlap_collectives
from offload.plan.steps import Copy, LaneKind, Wait
from offload.program import BoundProgram, Role, check_program
from offload.program.rewrite import renumbered
from offload.run.predicted_timeline import _exchanging
from offload.timeline import Scheduling, SpanKind

N_PROGRAMS = 30
JITTER = 0.1
"""The relative jitter of each launch and exchange against the simulation's duration."""


@pytest.fixture(scope="module")
def programs() -> list[VirtualProgram]:
    """Random programs with sums over ranks."""
    found = (virtual_program(seed, JITTER) for seed in range(2 * N_PROGRAMS))
    with_sums = [one for one in found if one.bound.program.groups]
    assert len(with_sums) >= N_PROGRAMS
    return with_sums[:N_PROGRAMS]


@pytest.mark.slow
def test_executed_orders_take_what_the_simulation_says_within_15_percent(programs):
    n_told_apart = 0
    for one in programs:
        program = one.bound.program
        orders = overlap_collectives(program, one.times)
        recorded = one.executable(program)
        recorded_ns, expected = one.makespan_ns(recorded)
        assert recorded_ns == pytest.approx(orders[-1].predicted_ns, rel=0.15)
        for order in (orders[0], orders[len(orders) // 2]):
            check_reordering(program, order.order)
            run = one.executable(in_order(program, order.order).program)
            makespan_ns, result = one.makespan_ns(run)
            assert makespan_ns == pytest.approx(order.predicted_ns, rel=0.15)
            assert torch.equal(result, expected)
            assert not result.isnan().any()
            run.close()
        recorded.close()
        # The same comparison refuses the prediction of another order.
        n_told_apart += recorded_ns > 1.15 * orders[0].predicted_ns
    assert n_told_apart > N_PROGRAMS // 2


def test_the_simulation_of_the_recorded_order_is_that_of_its_steps(programs):
    for one in programs:
        program = one.bound.program
        orders = overlap_collectives(program, one.times)
        assert simulate_collectives(program, one.times).period_ns == orders[-1].predicted_ns
        assert orders[-1].is_recorded
        assert lower_bound_ns(program, one.times) <= orders[0].predicted_ns * (1 + 1e-9)
        predicted = [order.predicted_ns for order in orders]
        assert predicted == sorted(predicted)


def test_a_collective_starts_when_its_input_is_there_and_waits_for_its_first_reader():
    one = next(
        found
        for found in map(virtual_program, range(100, 160))
        if len(started_collectives(found.bound.program)) == 1
    )
    program = one.bound.program
    (collective,) = started_collectives(program)
    times = dataclasses.replace(  # an exchange longer than all launches
        one.times, transfer_ns=tuple(1e9 if ns else 0.0 for ns in one.times.transfer_ns)
    )
    order = overlap_collectives(program, times)[0].order
    place = {launch: at for at, launch in enumerate(order)}
    (received,) = program.launches[collective.start].writes
    readers = [at for at in program.launches if received in at.reads and not at.is_collective]
    behind = {at.index for at in readers}
    for launch in program.launches:  # in recorded order each follows its operands
        if any(program.launches[at].writes[0] in launch.reads for at in behind):
            behind.add(launch.index)
    assert all(
        (place[at] > place[collective.waits[0]]) == (at in behind)
        for at in place
        if at not in (collective.start, collective.waits[0])
    )


def test_the_checker_refuses_steps_without_a_wait(programs):
    one = programs[0]
    run = one.executable(one.bound.program)
    launches, *groups = run.plan.collective_lanes
    assert [lane.kind for lane in groups] == [LaneKind.COLLECTIVES] * len(groups)
    check_order(run.program, run.plan)
    for lanes in (
        (dataclasses.replace(launches, steps=_without_last_wait(launches.steps)), *groups),
        (launches, dataclasses.replace(groups[0], steps=_without_last_wait(groups[0].steps))),
    ):
        with pytest.raises(PlanError, match=r"nothing orders the two|would not find"):
            check_order(run.program, dataclasses.replace(run.plan, collective_lanes=lanes))
    run.close()


def _without_last_wait(steps):
    last = max(at for at, step in enumerate(steps) if isinstance(step, Wait))
    return (*steps[:last], *steps[last + 1 :])


@pytest.mark.slow
def test_every_wrong_neighbour_exchange_is_refused(programs):
    n_refused = n_taken = 0
    for one in programs:
        program = one.bound.program
        run = one.executable(program)
        _, expected = one.makespan_ns(run)
        for at in range(len(program.launches) - 1):
            order = [*range(len(program.launches))]
            order[at], order[at + 1] = order[at + 1], order[at]
            try:
                check_reordering(program, order)
            except PlanError:
                n_refused += 1
                continue
            n_taken += 1
            if n_taken % 10 == 0:
                other = one.executable(in_order(program, order).program)
                assert torch.equal(one.makespan_ns(other)[1], expected)
                other.close()
        run.close()
    assert n_refused > 50
    assert n_taken > 50


def test_a_start_that_moves_behind_a_wait_is_refused(programs):
    """The way back from a good order: bytes allow it, and ranks could wait for one another."""
    n_refused = 0
    for one in programs:
        program = one.bound.program
        order = overlap_collectives(program, one.times)[0].order
        waits_before = sum(
            program.launches[first].waits and program.launches[second].name.endswith("all_reduce")
            for at, second in enumerate(order)
            for first in order[:at]
        )
        recorded_before = sum(
            first.waits and second.name.endswith("all_reduce")
            for second in program.launches
            for first in program.launches[: second.index]
        )
        assert waits_before <= recorded_before
        if waits_before < recorded_before:
            n_refused += 1
            back = [order.index(launch) for launch in range(len(order))]
            with pytest.raises(PlanError, match="ranks could wait for one another"):
                check_reordering(in_order(program, order).program, back)
    assert n_refused > N_PROGRAMS // 2


def test_predicted_spans_are_those_of_the_simulation(programs):
    for one in programs:
        program = one.bound.program
        spans = list(_exchanging(program, one.times, 0, "cpu"))
        launches = {span.launch: span for span in spans if span.kind is SpanKind.LAUNCH}
        exchanges = {span.launch: span for span in spans if span.kind is SpanKind.COLLECTIVE}
        assert len(launches) == len(program.launches)
        for found in started_collectives(program):
            exchange = exchanges.pop(found.start)
            assert launches[found.start].end_ns <= exchange.begin_ns
            assert exchange.end_ns <= launches[found.waits[0]].begin_ns + 1  # rounded
            assert exchange.duration_ns == pytest.approx(one.times.transfer_ns[found.start], abs=1)
        assert not exchanges
        last = max(span.end_ns for span in spans)
        assert last == pytest.approx(simulate_collectives(program, one.times).period_ns, abs=1)


def test_values_without_a_use_move_no_weight():
    """Bindings follow the Values, where an order drops some that no launch uses."""
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    bound = offload.capture(model, torch.ones(2, 4)).bound
    unused = dataclasses.replace(bound.program.values[0], index=0, role=Role.ACTIVATION)
    behind = {value.index: value.index + 1 for value in bound.program.values}
    program = bound.program
    moved = dataclasses.replace(
        program,
        values=(
            unused,
            *(dataclasses.replace(one, index=one.index + 1) for one in program.values),
        ),
        launches=tuple(renumbered(one, one.index, behind) for one in program.launches),
        inputs=tuple(dataclasses.replace(one, value=one.value + 1) for one in program.inputs),
        results=tuple(
            dataclasses.replace(one, view=dataclasses.replace(one.view, value=one.view.value + 1))
            for one in program.results
        ),
        weight_views={
            index + 1: tuple(dataclasses.replace(one, value=one.value + 1) for one in views)
            for index, views in program.weight_views.items()
        },
    )
    check_program(moved)
    load = _OverlapLoad(
        BoundProgram(moved, bound.bindings.moved(behind)),
        find_backend("cpu"),
        Options(Scheduling.OFFLOAD, fuse=False, budget=None, is_streamed=False, lanes=2),
        None,
        LoadedTogether(bound),
    )
    run = load.loaded()
    x = torch.randn(2, 4)
    assert torch.equal(run(x), model(x))
    assert len(run.program.values) == len(program.values)


def test_each_collective_is_a_copy_on_the_lane_of_its_group(programs):
    for one in programs:
        program = one.bound.program
        launches, *groups = collective_lanes(program)
        copies = [step.piece for lane in groups for step in lane.steps if isinstance(step, Copy)]
        assert copies == [found.start for found in started_collectives(program)]
        assert not launches.copies


def test_orders_of_a_limited_number_under_way_keep_less_memory(programs):
    for one in programs:
        program = one.bound.program
        for order in overlap_collectives(program, one.times):
            check_reordering(program, order.order)
            if not order.method.endswith("1 at once"):
                continue
            n_under_way = most = 0
            for at in order.order:
                launch = program.launches[at]
                n_under_way += launch.is_collective and not launch.waits
                n_under_way -= launch.waits
                most = max(most, n_under_way)
            assert most == 1
