"""`load(device=[...])`: launches on several devices give one device's results; errors once."""

import threading

import numpy
import pytest
import safetensors.torch
import torch
from checks import normal
from given_times import TWO, alternating, let_launches_take
from hypothesis import given, settings
from hypothesis import strategies as st
from on_lanes import Towers
from placed import placed_at_random
from random_programs import RETURNED, STEP_LISTS, RandomProgram, assert_as_eager
from torch import nn

import offload
from offload.api.captured import Captured
from offload.backends import CpuBackend
from offload.load import device_times
from offload.load import devices as device_loading
from offload.native import _native
from offload.program.slice import Slice, slice_program
from offload.run.device_choice import DeviceChoice, Placement, SegmentCosts
from offload.run.placed_executable import PlacedExecutable, PlacedSegment

WATTS = offload.Watts(idle=1.0, busy=2.0)


def at_random(bound, seed, n_processors=2, placement=Placement.STATIC):
    """A PlacedExecutable for random costs; all segments on all devices, unless static."""
    found, tasks = placed_at_random(bound.program, seed, n_processors)
    groups = [one.tasks for one in found.segments()]
    group_of = {task: at for at, group in enumerate(groups) for task in group}
    segments = []
    for at, group in enumerate(groups):
        launches = sorted(launch for task in group for launch in tasks.launches[task])
        part = slice_program(bound, launches) if len(groups) > 1 else Slice(bound, (), ())
        before = {
            group_of[edge.producer] for edge in tasks.graph.edges if group_of[edge.consumer] == at
        }
        planned = found.processors[group[0]]
        costs = [
            None if None in row else float(sum(row))
            for row in zip(*(tasks.graph.tasks[task].costs_ns for task in group), strict=True)
        ]
        if placement is Placement.STATIC:
            costs = [cost if one == planned else None for one, cost in enumerate(costs)]
        runs = tuple(
            None if cost is None else Captured(part.bound).load(CpuBackend(threads=1))
            for cost in costs
        )
        after = tuple(sorted(before - {at}))
        segments.append(PlacedSegment(part, runs, SegmentCosts(tuple(costs), after, planned)))
    choice = DeviceChoice([one.costs for one in segments], placement, 1.0)
    return PlacedExecutable(bound, found, segments, choice)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=STEP_LISTS,
    returned=RETURNED,
    seed=st.integers(0, 10**6),
    n_processors=st.integers(1, 3),
    is_local=st.booleans(),
    placement=st.sampled_from(Placement),
)
@torch.no_grad()
def test_random_programs_on_devices(steps, returned, seed, n_processors, is_local, placement):
    """Calls and submissions: results, inputs, weights and the generator equal eager's."""
    torch.manual_seed(len(steps))
    model = RandomProgram(steps, returned, is_local)
    x, y = normal(4, 4), normal(4, 4)
    captured = offload.capture(model, x.clone(), y.clone())
    run = at_random(captured.bound, seed, n_processors, placement)
    assert_as_eager(model, run, x, y)
    run.close()


@torch.no_grad()
def test_results_share_memory_as_those_of_the_model():
    def views(x):
        y = x * 2
        return y, y[1], x, y.t()

    captured = offload.capture(views, torch.randn(4, 4))
    run, x = at_random(captured.bound, 3), torch.randn(4, 4)
    whole, row, given, turned = run(x)
    assert given is x
    assert row.data_ptr() == whole.data_ptr() + 16
    assert turned.stride() == (1, 4)
    whole.zero_()
    assert not row.any()
    assert not turned.any()
    again = run(x)[0]
    assert again.data_ptr() != whole.data_ptr()


@torch.no_grad()
def test_executions_in_flight_are_told_apart(monkeypatch):
    let_launches_take(monkeypatch, alternating(4, 1e6))
    model, x = Towers(32, 4), torch.randn(8, 32)
    run = offload.capture(model, x).load(TWO)
    assert {one.costs.planned for one in run.segments} == {0, 1}
    inputs = [torch.randn(8, 32) for _ in range(20)]
    tickets = [run.submit(one) for one in inputs]
    for one, ticket in zip(inputs, tickets, strict=True):
        assert torch.equal(ticket.result(), model(one))
    assert all(map(torch.equal, run.map(inputs), map(model, inputs)))


@torch.no_grad()
def test_many_threads(monkeypatch):
    let_launches_take(monkeypatch, alternating(4, 1e6))
    model, x = Towers(32, 4), torch.randn(8, 32)
    run = offload.capture(model, x).load(TWO)
    wrong = []

    def call():
        with torch.no_grad():
            for _ in range(50):
                x = torch.randn(8, 32)
                if not torch.equal(run(x), model(x)):
                    wrong.append(x)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


@torch.no_grad()
def test_inputs_are_refused_before_anything_runs(monkeypatch):
    let_launches_take(monkeypatch, alternating(1, 1e6))

    def write(x, y):
        x.add_(1)
        return x.sin() + y.cos()

    run = offload.capture(write, torch.zeros(4), torch.zeros(4)).load(TWO)
    x = torch.zeros(4)
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.int64), torch.zeros(8)[::2]):
        with pytest.raises(offload.BindingError, match=r"args\[1\].*expected float32\[4\]"):
            run(x, other)
    assert not x.any()
    with pytest.raises(offload.BindingError):
        run(x)
    run.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(x, x)
    with pytest.raises(offload.CopyError):
        run.__reduce_ex__(2)


@pytest.mark.parametrize(("times_ns", "n_devices"), [((1e3, 2e3), 2), ((2e3, 1e3), 1)])
@torch.no_grad()
def test_launches_are_timed_and_the_quicker_way_is_kept(monkeypatch, times_ns, n_devices):
    """Calls on one device take ten times their launches' durations, which are scaled to that."""
    monkeypatch.setattr(
        device_times, "typical_ns", lambda run, _: (1e6,) * len(run.program.launches)
    )
    monkeypatch.setattr(
        device_times,
        "call_and_submission_ns",
        lambda run, _: (10e6 * len(run.program.launches), 10.001e6 * len(run.program.launches)),
    )
    monkeypatch.setattr(device_loading, "calls_in_turns_ns", lambda *_: list(times_ns))
    model, x = Towers(64, 4), torch.randn(8, 64)
    run = offload.capture(model, x).load(TWO)
    assert {cost for task in run.placement.graph.tasks for cost in task.costs_ns} >= {int(10e6)}
    assert len({one.costs.planned for one in run.segments}) == n_devices
    assert torch.equal(run(x), model(x))
    assert "measured at the load" in run.explain()
    assert "runner-up: on " in run.explain()
    assert "no other processor" not in run.explain()
    assert ("found by measurement" in run.explain()) == (n_devices == 1)
    assert "nJ" not in run.explain()  # nobody gave watts


@pytest.mark.parametrize("placement", ["hybrid", "dynamic"])
@torch.no_grad()
def test_segments_leave_a_device_that_is_slowed_down(placement, monkeypatch):
    let_launches_take(monkeypatch, [lambda _: 20e3, lambda _: 25e3])
    monkeypatch.setattr(device_times, "_HAND_OVER_NS", 100.0)
    model, x = Towers(64, 4), torch.randn(8, 64)
    run = offload.capture(model, x).load(TWO, placement=placement)
    assert len(run.segments) > 2
    assert all(None not in one.runs for one in run.segments)
    for _ in range(5):
        assert torch.equal(run(x), model(x))
    for one in run.segments:
        _native.set_share(one.runs[0]._loaded.resident, 1, 0.005)
        _native.set_share(one.runs[1]._loaded.resident, 1, 1.0)
    for _ in range(15):
        assert torch.equal(run(x), model(x))
    assert run.choice.n_moved >= 1
    assert "segments were moved" in run.explain()
    assert torch.equal(run.submit(x).result(), model(x))


@pytest.mark.slow
@torch.no_grad()
def test_fused_segments(monkeypatch):
    let_launches_take(monkeypatch, alternating(4, 1e6))
    model, x = Towers(32, 4), torch.randn(8, 32)
    run = offload.capture(model, x).load(TWO, fuse=True)
    assert any(one.run(one.costs.planned).fusion.regions for one in run.segments)
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("period", [1, 100])
@torch.no_grad()
def test_buffers_are_refused(monkeypatch, period):
    let_launches_take(monkeypatch, alternating(period, 1e6))
    x = torch.randn(4)
    run = offload.capture(lambda x: x.sin().cos().exp(), x).load(TWO)
    assert (len(run.segments) > 1) == (period == 1)
    for call in (run, run.submit):
        with pytest.raises(offload.BindingError, match="out: an executable on several devices"):
            call(x, out=torch.empty(4))


@torch.no_grad()
def test_what_is_refused(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    captured = offload.capture(model, x)
    for options, message in (
        ({"device": []}, "expected a list of at least one"),
        ({"device": "cpu", "objective": "latency"}, "expected a list of at least one"),
        ({"device": TWO, "objective": "power"}, "expected one of latency, throughput, energy"),
        ({"device": TWO, "objective": "energy", "watts": [WATTS]}, "for each of 2 devices"),
        ({"device": TWO, "objective": "energy", "max_slowdown": 0.5}, "a number of 1 or more"),
        ({"device": TWO, "objective": "energy", "max_slowdown": 10**400}, "a number of 1 or more"),
        ({"device": TWO, "watts": [WATTS, WATTS]}, "are for objective='energy'"),
        ({"device": TWO, "max_slowdown": 2.0}, "are for objective='energy'"),
        ({"device": "cpu", "watts": [WATTS]}, "expected a list of at least one"),
        ({"device": TWO, "placement": "late"}, "expected one of static, hybrid, dynamic"),
        ({"device": "cpu", "placement": "static"}, "expected a list of at least one"),
        ({"device": TWO, "weights_budget": "1MiB"}, "weights_budget"),
        ({"device": TWO, "sizes": offload.Sizes()}, "sizes"),
    ):
        with pytest.raises(offload.BindingError, match=message):
            captured.load(**options)
    for devices, message in (
        (["cpu", "null"], "'null' computes nothing"),
        (["null"], "'null' computes nothing"),
        ((CpuBackend(), "cpu"), "several devices are a list"),
    ):
        with pytest.raises(offload.BackendUnavailable, match=message):
            captured.load(devices)
    nan = float("nan")
    for idle, busy in (
        *((2.0, 1.0), (-1.0, 1.0), (0.0, float("inf")), (nan, 1.0), (0.0, nan)),
        *((0, 10**400), (0, 1e10), ("1", 2), (None, 1.0), (False, True)),
    ):
        with pytest.raises(offload.BindingError, match="0 <= idle <= busy"):
            offload.Watts(idle=idle, busy=busy)
    assert offload.Watts(idle=numpy.float32(1), busy=numpy.int64(2)).busy == 2
    for wrong in ({"threads": 0}, {"threads": True}, *({"duty": one} for one in (0, "1", None))):
        with pytest.raises(offload.BackendUnavailable, match="expected"):
            CpuBackend(**wrong)


@pytest.mark.parametrize("devices", [["cpu"], TWO])
def test_weights_in_files_are_refused(tmp_path, devices):
    safetensors.torch.save_file(nn.Linear(4, 4).state_dict(), tmp_path / "weights.safetensors")
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    captured = offload.capture(model, torch.zeros(2, 4), weights=tmp_path / "weights.safetensors")
    with pytest.raises(offload.CaptureError, match="weights are in files"):
        captured.load(devices)


@torch.no_grad()
def test_threads_of_a_backend_are_those_of_its_launches():
    library = torch.library.Library("device_threads", "DEF")
    library.define("count(Tensor x) -> Tensor")
    library.impl(
        "count", lambda x: torch.full_like(x, torch.get_num_threads()), "CompositeExplicitAutograd"
    )
    captured = offload.capture(torch.ops.device_threads.count, torch.zeros(1))
    for threads in (1, 2, 3):
        run = captured.load(CpuBackend(threads=threads))
        for _ in range(3):
            assert run(torch.zeros(1)).item() == threads
        assert run.submit(torch.zeros(1)).result().item() == threads
    assert torch.get_num_threads() == 1


@torch.no_grad()
def test_results_lie_on_the_device_of_the_program(monkeypatch):
    let_launches_take(monkeypatch, alternating(1, 1e6))

    def chain(x):
        return (x.sin() + 1).cos().exp()

    x = torch.randn(4)
    run = offload.capture(chain, x).load(TWO)
    assert len(run.segments) > 1
    with torch.device("meta"):
        assert torch.equal(run(x), chain(x))
