"""Launches on several lanes: the bits of one lane, for every placement and any helpers."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from checks import Call, assert_same, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from on_lanes import Towers, on_lanes, poisoned, programs, without_step
from random_programs import RETURNED, STEP_LISTS, RandomProgram
from torch import nn

import offload
from offload.errors import BindingError, ExecutionError, PlanError
from offload.plan import check_plan
from offload.plan.steps import Run, Wait

PROGRAMS = programs()


@pytest.mark.slow
@pytest.mark.parametrize("n_lanes", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_results_have_the_bits_of_one_lane(name, n_lanes):
    """Memory is overwritten once it is unused, and inputs move."""
    model, calls = PROGRAMS[name]
    captured = offload.capture(model, *calls[0])
    run = poisoned(on_lanes(captured.bound, n_lanes))
    assert len(run.plan.lanes) > 1
    expected = [model(*call) for call in calls]
    for turn in range(40):
        got = run(*calls[turn % 4])
        assert_same(got, expected[turn % 4])
    counts = run.lanes.counts()
    assert (counts.n_shared, counts.n_alone) == (39, 1)


@torch.no_grad()
def test_helpers_run_launches():
    model, x = Towers(128, 4), torch.randn(16, 128)
    run = on_lanes(offload.capture(model, x).bound, 2)
    for _ in range(200):
        assert_same(run(x), model(x))
        if run.lanes.counts().n_helped:
            break
    assert run.lanes.counts().n_helped > 0


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(steps=STEP_LISTS, returned=RETURNED, n_lanes=st.integers(2, 4), data=st.data())
@torch.no_grad()
def test_random_programs_on_lanes(steps, returned, n_lanes, data):
    """Views, writes, draws and reads in any order, on lanes for any durations of launches."""
    torch.manual_seed(len(steps))
    model = RandomProgram(steps, returned)
    call = Call(normal(4, 4), normal(4, 4))
    captured = offload.capture(model, *call.copy().args)
    size = len(captured.program.launches)
    costs = data.draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))
    one = captured.load()
    run = poisoned(on_lanes(captured.bound, n_lanes, [float(cost) for cost in costs]))
    kept = [model.state.clone(), model.weight.clone()]
    generator = torch.get_rng_state()
    for _ in range(4):
        outcomes = []
        for executable in (one, run):
            model.state.copy_(kept[0])
            model.weight.copy_(kept[1])
            torch.set_rng_state(generator)
            arguments = call.copy()
            result = arguments.on(executable)
            written = model.state.clone(), model.weight.clone()
            outcomes.append((result, arguments.args, written, torch.get_rng_state()))
        assert_same(outcomes[1], outcomes[0], tolerance=0.0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=STEP_LISTS, returned=RETURNED, n_lanes=st.integers(2, 4))
@torch.no_grad()
def test_a_plan_without_one_of_its_waits_is_refused(steps, returned, n_lanes):
    torch.manual_seed(len(steps))
    captured = offload.capture(RandomProgram(steps, returned), normal(4, 4), normal(4, 4))
    run = on_lanes(captured.bound, n_lanes)
    check_plan(run.program, run.plan)
    for lane, one in enumerate(run.plan.lanes):
        # Those at the end are for the caller, whom the checker does not model.
        runs = [at for at, step in enumerate(one.steps) if isinstance(step, Run)]
        last = max(runs, default=0)
        for at, step in enumerate(one.steps[:last]):
            if isinstance(step, Wait) and step.age == 0:
                with pytest.raises(PlanError):
                    check_plan(run.program, without_step(run.plan, lane, at))


class Rows(nn.Module):
    """Two towers that begin with rows of tables, which may not exist."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 16) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, first, second):
        left = self.layers[1](self.layers[0](self.tables[0](first)).sort(-1)[0]).cumsum(-1)
        right = self.layers[3](self.layers[2](self.tables[1](second)).sort(-1)[0]).cumsum(-1)
        return left + right


@torch.no_grad()
def test_a_launch_that_fails_ends_the_execution_and_the_next_is_right():
    model = Rows().eval()
    good = torch.tensor([1, 2]), torch.tensor([3, 4])
    bad = torch.tensor([99, 2])
    run = poisoned(on_lanes(offload.capture(model, *good).bound, 2))
    expected = model(*good)
    assert_same(run(*good), expected)
    for turn in range(60):
        first, second = (bad, good[1]) if turn % 2 else (good[0], bad)
        with pytest.raises(ExecutionError, match="aten::embedding: index out of range") as error:
            run(first, second) if turn % 3 else run.submit(first, second).result()
        assert str(error.value).count("aten::embedding") == 1
        with pytest.raises(ExecutionError):  # either error
            run(bad, bad)
        assert_same(run(*good), expected)
    assert run.lanes.counts().n_shared == 180


@torch.no_grad()
def test_a_guard_ends_an_execution_before_a_generator_has_moved():
    def drawing(x, limit):
        drawn = torch.rand(4)
        return (x.sin() * 2, drawn + x) if limit.item() > 0 else x

    def guarded(x, limit):
        is_over = limit.item() > 0
        drawn = torch.rand(4)
        return (x.sin() * 2, drawn + x) if is_over else x

    x, one = torch.randn(4), torch.tensor(1.0)
    with pytest.raises(offload.errors.CaptureError):
        offload.capture(drawing, x, one, host_reads="guard")
    run = on_lanes(offload.capture(guarded, x, one, host_reads="guard").bound, 3)
    run(x, one)
    for _ in range(50):
        state = torch.get_rng_state()
        with pytest.raises(BindingError, match="on the host"):
            run(x, torch.tensor(2.0))
        assert torch.equal(torch.get_rng_state(), state)
        run(x, one)


@pytest.mark.slow
@torch.no_grad()
def test_memory_that_operators_allocate_is_given_back():
    """Each execution makes 24 results of 1 MiB, of which it returns three."""
    resource = pytest.importorskip("resource")
    model, _ = PROGRAMS["sorted"]
    x = torch.randn(512, 512)
    run = on_lanes(offload.capture(model, x).bound, 2)
    expected = model(x)
    for _ in range(5):
        assert_same(run(x), expected)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        run(x)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 20 * 1024


@torch.no_grad()
def test_tickets_threads_and_closing():
    model, x = Towers(), torch.randn(4, 16)
    run = on_lanes(offload.capture(model, x).bound, 2)
    expected = model(x)
    tickets = [run.submit(x) for _ in range(20)]
    found: list[bool] = []

    def call():
        with torch.no_grad():
            found.extend(torch.equal(run(x), expected) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for ticket in tickets:
        assert_same(ticket.result(), expected)
    for thread in threads:
        thread.join()
    assert found == [True] * 150
    last = run.submit(x)
    run.close()
    assert_same(last.result(), expected)
    with pytest.raises(ExecutionError, match="closed"):
        run(x)


@torch.no_grad()
def test_executables_share_the_helpers():
    model, calls = PROGRAMS["experts"]
    captured = offload.capture(model, *calls[0])
    expected = model(*calls[0])
    runs = [on_lanes(captured.bound, 3) for _ in range(3)]
    found: list[bool] = []

    def call(run):
        with torch.no_grad():
            found.extend(torch.equal(run(*calls[0]), expected) for _ in range(60))

    threads = [threading.Thread(target=call, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 180
    runs.clear()
    gc.collect()


@torch.no_grad()
def test_a_placement_of_the_callers_own():
    model, calls = PROGRAMS["heads"]
    run = poisoned(on_lanes(offload.capture(model, *calls[0]).bound, 2))
    for turn in range(12):
        memory = torch.full((run.feature_map_bytes + 64 * turn,), 0xFD, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        memory = memory[start:] if start < 64 * turn else memory
        if memory.data_ptr() % run.plan.alignment_bytes or len(memory) < run.feature_map_bytes:
            continue
        got = run(*calls[turn % 4], feature_map=memory)
        assert_same(got, model(*calls[turn % 4]))
