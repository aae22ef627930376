"""Stages of a pipeline: cuts against all possible cuts, and the Values that stages send."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.errors import PlanError, ProgramError
from offload.plan.pipeline_stages import PipelineStages, cut_stages
from offload.plan.program_tasks import ProgramTasks, program_tasks
from offload.plan.task_graph import Edge, Processor
from offload.plan.topology import Link
from offload.program import Group, Program
from offload.program.stage import check_stageable, messages_of, stage_program

LINK = Link(bytes_per_second=1e9, overhead_ns=500.0)
FAST = Link(bytes_per_second=1e12, overhead_ns=0.0)


def chain(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    first = x.relu()
    second = first.exp()
    third = (second @ second.t()).tanh()
    fourth = third.sum(0) + first.sum(1)
    return (fourth * scale).sigmoid().neg()


@pytest.fixture(scope="module")
def captured() -> offload.Captured:
    return offload.capture(chain, torch.ones(6, 8), torch.ones(6))


def tasks_of(program: Program, launch_ns: list[float], n_stages: int, link: Link) -> ProgramTasks:
    processors = [Processor(f"rank {one}") for one in range(n_stages)]
    links = dict.fromkeys(itertools.permutations(range(n_stages), 2), link)
    return program_tasks(program, [[ns] * n_stages for ns in launch_ns], processors, links, home=0)


def cut(
    program: Program, launch_ns: list[float], n_stages: int, link: Link, n_micro_batches: int = 4
) -> PipelineStages:
    tasks = tasks_of(program, launch_ns, n_stages, link)
    return cut_stages(program, tasks, link, n_stages, n_micro_batches)


def crossing_bytes(program: Program, cut: int) -> int:
    """Bytes made before `cut` that later launches or the caller use."""
    before = {view.value for view in program.inputs}
    behind = {result.view.value for result in program.results}
    for launch in program.launches:
        for value in launch.touched():
            (before if launch.index < cut else behind).add(value)
    return sum(program.values[value].size_bytes for value in before & behind)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n_stages=st.integers(1, 4))
def test_no_cut_has_a_quicker_slowest_stage(captured, seed, n_stages):
    program = captured.program
    draws = random.Random(seed)
    launch_ns = [float(draws.randint(1, 2000)) for _ in program.launches]
    found = cut(program, launch_ns, n_stages, LINK)
    n_launches = len(launch_ns)
    assert [*itertools.chain(*found.launches)] == [*range(n_launches)]
    periods = []
    for cuts in itertools.combinations(range(1, n_launches), n_stages - 1):
        stages = itertools.pairwise((0, *cuts, n_launches))
        periods.append(
            max(
                sum(launch_ns[first:last])
                + (LINK.overhead_ns + crossing_bytes(program, first) if first else 0.0)
                for first, last in stages
            )
        )
    assert found.period_ns == pytest.approx(min(periods))
    assert found.lower_bound_ns <= found.period_ns * (1 + 1e-6) + 1


def test_a_call_takes_what_the_slowest_stage_takes_and_its_fill(captured):
    launch_ns = [1000.0] * len(captured.program.launches)
    for n_stages, n_micro_batches in itertools.product((1, 2, 3), (1, 2, 8)):
        found = cut(captured.program, launch_ns, n_stages, FAST, n_micro_batches)
        stages = [sum(one) for one in zip(found.stage_ns, found.received_ns, strict=True)]
        ends = [0.0] * n_stages  # an independent recurrence: when each stage is free
        for _ in range(n_micro_batches):
            ready = 0.0
            for stage, ns in enumerate(stages):
                ready = ends[stage] = max(ready, ends[stage]) + ns
        assert found.predicted_ns == pytest.approx(ends[-1])
        assert found.sequential_ns == sum(launch_ns) * n_micro_batches


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
def test_stages_have_all_launches_weights_and_what_they_send_one_another(captured, n_stages):
    program = captured.program
    stages = cut(program, [1000.0] * len(program.launches), n_stages, FAST).launches
    messages = messages_of(program, stages)
    sent, received = set(), set()
    names = []
    for number in range(n_stages):
        group = Group("0", tuple(range(n_stages)), number, n_stages)
        made = stage_program(captured.bound, stages, number, group if n_stages > 1 else None)
        own = made.bound.program
        for launch in own.launches:
            if launch.name.endswith("isend"):
                sent.add((number, *launch.arguments[1:3]))
            elif launch.name.endswith("irecv"):
                received.add((launch.arguments[1], number, launch.arguments[2]))
            elif not launch.is_collective:
                names.append(launch.name)
        assert len(own.inputs) == (len(program.inputs) if number == 0 else 0)
        assert len(own.results) == (len(program.results) if number == n_stages - 1 else 0)
        assert bool(own.groups) == (n_stages > 1)
    assert names == [launch.name for launch in program.launches]
    assert sent == received == {(one.sender, one.receiver, one.tag) for one in messages}
    assert all(one.sender < one.receiver for one in messages)


def test_tasks_at_home_give_the_inputs_and_take_the_results(captured):
    program = captured.program
    processors = [Processor("home"), Processor("other")]
    links = dict.fromkeys(itertools.permutations(range(2), 2), LINK)
    costs_ns = [[1.0, 1.0]] * len(program.launches)
    without = program_tasks(program, costs_ns, processors, links, home=0)
    made = program_tasks(program, costs_ns, processors, links, home=0, has_ends=True)
    given, taken = len(without.graph.tasks), len(without.graph.tasks) + 1
    assert [one.costs_ns for one in made.graph.tasks[given:]] == [(0, None), (0, None)]
    assert made.launches[given:] == ((), ())
    ends = set(made.graph.edges) - set(without.graph.edges)
    scaled = next(one.index for one in program.launches if one.name == "aten::mul.Tensor")
    assert ends == {
        Edge(given, 0, 6 * 8 * 4),
        Edge(given, scaled, 6 * 4),
        Edge(len(program.launches) - 1, taken, 6 * 4),
    }


def test_more_stages_than_tasks_are_refused(captured):
    n_launches = len(captured.program.launches)
    with pytest.raises(PlanError, match=f"at least {n_launches + 1} tasks"):
        cut(captured.program, [1.0] * n_launches, n_launches + 1, FAST)


def test_what_cannot_be_cut_is_told():
    with pytest.raises(ProgramError, match="writes inputs or weights"):
        check_stageable(offload.capture(lambda x: x.add_(1) * 2, torch.ones(3)).program)
    with pytest.raises(ProgramError, match="draws random numbers"):
        check_stageable(offload.capture(lambda x: torch.rand(3) + x, torch.ones(3)).program)
    guarded = offload.capture(
        lambda x: x + 1 if x.sum().item() > 0 else x * 2, torch.ones(3), host_reads="guard"
    )
    with pytest.raises(ProgramError, match="may end the execution"):
        check_stageable(guarded.program)
    with pytest.raises(ProgramError, match="no launch makes"):
        check_stageable(offload.capture(lambda x: (x + 1, x), torch.ones(3)).program)
    program = offload.capture(torch.relu, torch.ones(3)).program
    group = Group("0", (0, 1), 0, 2)
    with pytest.raises(ProgramError, match="collectives already"):
        check_stageable(dataclasses.replace(program, groups=(group,)))
