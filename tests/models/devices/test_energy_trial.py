"""`objective="energy"`: the slowdown is held by what calls take, on a virtual clock."""

import pytest
import torch
from apart import apart_devices
from checks import normal
from on_lanes import Towers

import offload
from offload.load import device_times
from offload.load import devices as device_loading

# The second device takes less power and, as predicted, half as long again.
WATTS = [offload.Watts(idle=1.0, busy=100.0), offload.Watts(idle=1.0, busy=2.0)]
COSTS_NS = (1e6, 1.5e6)


def let_calls_take(monkeypatch, costs_ns):
    """Load on two devices with separate memories; launches then take these times there."""
    asked = []
    devices = apart_devices(2)
    monkeypatch.setattr(device_loading, "placed_devices", lambda *_: devices)
    monkeypatch.setattr(
        device_times.DeviceTimes,
        "launch_ns",
        lambda self, at: [COSTS_NS[at]] * len(self.bound.program.launches),
    )

    def times_ns(runs, what, made_up):
        asked.append([devices_of(run) for run in runs])
        return [
            sum(
                costs_ns[one.costs.planned] * len(one.slice.bound.program.launches)
                for one in run.segments
            )
            for run in runs
        ]

    monkeypatch.setattr(device_loading, "calls_in_turns_ns", times_ns)
    return asked


def devices_of(run):
    return {one.costs.planned for one in run.segments}


@pytest.mark.parametrize(
    ("measured_ns", "max_slowdown", "devices"),
    [
        ((1e6, 1.5e6), 2.0, {1}),  # as predicted
        ((1e6, 1.9e6), 2.0, {1}),  # slower, and slow enough is allowed
        ((1e6, 5e6), 2.0, {0}),  # far slower than predicted
        ((9e6, 1e6), 2.0, {1}),  # it is even quicker
        ((1e6, 1.5e6), 1.0, {0}),
    ],
)
@torch.no_grad()
def test_the_slowdown_is_held_as_measured(monkeypatch, measured_ns, max_slowdown, devices):
    model, x = Towers(16, 3, n=1), normal(4, 16)
    asked = let_calls_take(monkeypatch, measured_ns)
    with offload.capture(model, x).load(
        ["cpu", "cpu"], objective="energy", watts=WATTS, max_slowdown=max_slowdown
    ) as run:
        assert devices_of(run) == devices
        assert run.placement.objective == "energy"
        told = run.explain()
        assert "energy:" in told
        assert "watts are as given" in told
        assert "measured at the load: calls take" in told
        other = "runner-up: on " in told or "is fast enough" in told
        assert other, told
        torch.testing.assert_close(run(x), model(x))
    assert {0} in asked[0]
    assert {1} in asked[0]


@torch.no_grad()
def test_it_is_placed_again_with_a_smaller_limit(monkeypatch):
    """The least energy splits the program where all on the second device is too slow."""
    model, x = Towers(16, 3, n=1), normal(4, 16)
    let_calls_take(monkeypatch, (1e6, 2e6))
    captured = offload.capture(model, x)
    energies = {}
    for slowdown in (1.0, 1.6, 3.0):
        with captured.load(
            ["cpu", "cpu"], objective="energy", watts=WATTS, max_slowdown=slowdown
        ) as run:
            n_there = sum(
                len(one.slice.bound.program.launches)
                for one in run.segments
                if one.costs.planned == 1
            )
            n_launches = len(captured.program.launches)
            took = (2 * n_there + n_launches - n_there) / n_launches
            assert took <= slowdown * 1.03
            energies[slowdown] = run.placement.energy_nj
            torch.testing.assert_close(run(x), model(x))
    assert energies[1.0] > energies[1.6] > energies[3.0]


@torch.no_grad()
def test_saving_energy_keeps_segments_where_they_were_placed():
    captured = offload.capture(Towers(16, 3, n=1), normal(4, 16))
    for placement in ("hybrid", "dynamic"):
        with pytest.raises(offload.BindingError, match="expected placement='static'"):
            captured.load(["cpu", "cpu"], objective="energy", watts=WATTS, placement=placement)
