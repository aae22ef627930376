"""Loads on devices with separate memories: who has room for what; times of launches and links."""

import dataclasses
import itertools

import pytest
import torch
from apart import apart_devices, movable_tasks
from checks import normal
from given_times import let_launches_take
from on_lanes import Towers
from torch import nn

import offload
from offload.backends import CpuBackend
from offload.load import device_times
from offload.load import devices as device_loading
from offload.plan.topology import Link


class Table(nn.Module):
    def __init__(self, n=1000):
        super().__init__()
        self.table = nn.Embedding(n, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, tokens):
        return self.second(self.first(self.table(tokens)).relu())


class Limited(CpuBackend):
    """A processor with this much memory."""

    def __init__(self, memory_bytes):
        super().__init__(threads=1)
        self.memory_bytes = memory_bytes

    def machine(self, index=None):
        return dataclasses.replace(super().machine(index), memory_bytes=self.memory_bytes)


def let_devices_be(monkeypatch, costs_ns, backends=None, *, measures_links=False):
    """A load on two devices with separate memories, with these durations of launches."""
    devices = apart_devices(2, backends)
    if not measures_links:
        links = dict.fromkeys(itertools.permutations(range(2), 2), Link(1e9, 1e4))
        monkeypatch.setattr(device_loading, "measured_links", lambda *_: links)
    monkeypatch.setattr(device_loading, "placed_devices", lambda *_: devices)
    let_launches_take(monkeypatch, [lambda _, one=one: one for one in costs_ns])


@torch.no_grad()
def test_a_table_that_a_device_has_no_room_for_stays(monkeypatch):
    model, tokens = Table(), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    table = 1000 * 64 * 4
    for limit, n_here in ((table // 2, 1), (10 * table, 0)):
        let_devices_be(monkeypatch, [1e9, 1e3], (CpuBackend(threads=1), Limited(limit)))
        with captured.load(["cpu", "cpu"]) as run:
            planned = [one.costs.planned for one in run.segments]
            n_launches = [len(one.slice.bound.program.launches) for one in run.segments]
            assert sum(n for n, at in zip(n_launches, planned, strict=True) if at == 0) == n_here
            assert torch.equal(run(tokens), model(tokens))


@torch.no_grad()
def test_activations_count_as_well(monkeypatch):
    """Weights fit the second device; with crossing Values and activations they do not."""
    model, x = Towers(32, 4, n=1), normal(512, 32)
    captured = offload.capture(model, x)
    weights = sum(one.nbytes for one in model.parameters())
    let_devices_be(monkeypatch, [1e9, 1e3], (CpuBackend(threads=1), Limited(weights)))
    with captured.load(["cpu", "cpu"]) as run:
        assert {one.costs.planned for one in run.segments} == {0}
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_weights_that_other_devices_read_count_at_home_as_well(monkeypatch):
    """The model keeps them there: the room beside them is what activations at home may take."""
    model, tokens = Table(100), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    weights = sum(one.nbytes for one in model.parameters())
    for limit, fits in ((weights // 2, False), (weights, False), (weights + 10_000, True)):
        let_devices_be(monkeypatch, [1e9, 1e3], (Limited(limit), CpuBackend(threads=1)))
        if not fits:
            with pytest.raises(offload.PlanError, match=r"takes .* of .* on cpu"):
                captured.load(["cpu", "cpu"])
            continue
        with captured.load(["cpu", "cpu"]) as run:
            assert {one.costs.planned for one in run.segments} == {1}
            assert torch.equal(run(tokens), model(tokens))


@torch.no_grad()
def test_a_memory_limit_that_falls_by_one_byte_at_a_time(monkeypatch):
    """Around the floor a load either holds the limit and is right, or is a PlanError: no gap."""
    model, tokens = Table(10), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    for at in (0, 1):
        fitting: dict[int, bool] = {}

        def fits(limit, at=at, fitting=fitting):
            if limit not in fitting:
                backends = [CpuBackend(threads=1), CpuBackend(threads=1)]
                backends[at] = Limited(limit)
                costs_ns = [1e9, 1e3] if at else [1e3, 1e9]
                let_devices_be(monkeypatch, costs_ns, tuple(backends))
                try:
                    with captured.load(["cpu", "cpu"]) as run:
                        assert torch.equal(run(tokens), model(tokens))
                        planned = {one.costs.planned for one in run.segments}
                        fitting[limit] = at == 0 or planned == {1}
                except offload.PlanError:
                    fitting[limit] = False
            return fitting[limit]

        low, high = 0, 1 << 20
        assert fits(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        around = [fits(high + step) for step in range(-12, 13)]
        assert around == sorted(around)
        assert around[11:13] == [False, True]


@pytest.mark.parametrize("placement", ["hybrid", "dynamic"])
@torch.no_grad()
def test_segments_that_may_be_moved_are_loaded_where_there_is_room(placement, monkeypatch):
    model, tokens = Table(100), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    weights = sum(one.nbytes for one in model.parameters())
    for limit in (1, weights // 2, weights, 10 * weights):
        let_devices_be(monkeypatch, [1e6, 1.2e6], (CpuBackend(threads=1), Limited(limit)))
        with captured.load(["cpu", "cpu"], placement=placement) as run:
            there = run._queue.memories[1]
            assert (run._copies.size_bytes(there) if run._copies else 0) <= limit
            assert all(one.runs[0] is not None for one in run.segments)
            n_there = sum(one.runs[1] is not None for one in run.segments)
            assert {1: n_there == 0, 10 * weights: n_there == len(run.segments)}.get(limit, True)
            assert torch.equal(run(tokens), model(tokens))


@torch.no_grad()
def test_what_fits_nowhere_is_an_error_that_says_what_it_takes(monkeypatch):
    captured = offload.capture(Table(), torch.tensor([1, 2, 3]))
    let_devices_be(monkeypatch, [1e3, 1e3], (Limited(1000), Limited(1000)))
    with pytest.raises(offload.PlanError, match=r"memory.* bytes"):
        captured.load(["cpu", "cpu"])


@torch.no_grad()
def test_links_are_measured_and_told(monkeypatch):
    model, x = Towers(16, 3), normal(4, 16)
    let_devices_be(monkeypatch, [1e6, 1e3], measures_links=True)
    with offload.capture(model, x).load(["cpu", "cpu"]) as run:
        assert "GB/s" in run.explain()
        assert {one.costs.planned for one in run.segments} == {1}
        assert movable_tasks(run.program)
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_launches_are_timed_where_they_would_run():
    model, x = Towers(16, 3), normal(4, 16)
    captured = offload.capture(model, x)
    devices = apart_devices(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_loading, "placed_devices", lambda *_: devices)
        patch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)
        run = captured.load(["cpu", "cpu"], objective="throughput")
    with run:
        costs = [one.costs_ns for one in run.placement.graph.tasks[:-2]]
        assert all(None not in one for one in costs)
        assert all(map(torch.equal, run.map([x] * 6), [run(x)] * 6))
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_a_device_that_cannot_run_a_segment_after_all(monkeypatch):
    model, x = Towers(16, 3, n=1), normal(4, 16)
    captured = offload.capture(model, x)

    class Refusing(CpuBackend):
        def prepare(self, bound):
            if any("gelu" in one.name for one in bound.program.launches):
                raise offload.CaptureError("no gelu here")
            return super().prepare(bound)

    let_devices_be(monkeypatch, [1e6, 1e3], (CpuBackend(threads=1), Refusing(threads=1)))
    with captured.load(["cpu", "cpu"]) as run:
        assert "no gelu here" in run.explain()
        there = [one for one in run.segments if one.costs.planned == 1]
        names = [each.name for one in there for each in one.slice.bound.program.launches]
        assert not any("gelu" in one for one in names)
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_the_quicker_device_has_no_room_for_all(monkeypatch):
    """It is not tried alone, and the load continues; untimed devices are estimated."""
    model, tokens = Table(), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    devices = apart_devices(2, (CpuBackend(threads=1), Limited(100_000)))
    monkeypatch.setattr(device_loading, "placed_devices", lambda *_: devices)
    monkeypatch.setattr(
        device_times, "typical_ns", lambda run, _: (1e6,) * len(run.program.launches)
    )
    with captured.load(["cpu", "cpu"]) as run:
        there = run.placement.graph.processors[1]
        assert there.memory_bytes <= 100_000
        assert all(None not in one.costs_ns for one in run.placement.graph.tasks[:-2])
        assert "estimated: weights do not fit for a trial" in run.explain()
        assert torch.equal(run(tokens), model(tokens))
