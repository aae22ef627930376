"""`load(costs=)`: durations of launches from former loads replace timing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import offload
from offload.backends import CpuBackend
from offload.costs import signature_of
from offload.program import Kernel


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        return self.left(x) + self.right(x)


@pytest.fixture
def captured():
    torch.manual_seed(0)
    return offload.capture(Towers().eval(), torch.randn(4, 32))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def n_measurements(costs):
    return {one.n_measurements for known in costs.costs.values() for one in known.values()}


def learnt(costs, device, program):
    """Measurements as of three loads."""
    for _ in range(3):
        launch_ns = [1_000.0 * (1 + at) for at in range(len(program.launches))]
        costs.take(CpuBackend().machine().name, device, program, launch_ns)
    return costs


def test_what_is_unknown_is_measured_and_added(captured, tmp_path):
    costs = offload.LaunchCosts(tmp_path / "costs.json")
    with captured.load(lanes=2, costs=costs) as run:
        assert not run.lane_choice.kept
    assert n_measurements(costs) == {1}
    costs.save()
    again = offload.LaunchCosts(tmp_path / "costs.json")
    assert again.costs == costs.costs
    assert again.machine == CpuBackend().machine().name


def test_lanes_are_planned_by_what_is_known(captured):
    costs = learnt(offload.LaunchCosts(), "cpu, one thread for a launch", captured.program)
    before = costs.costs
    x = torch.randn(4, 32)
    with captured.load(lanes=2, costs=costs) as run, captured.load() as one_lane:
        assert run.lane_choice.kept
        assert "kept from former loads" in run.explain()
        ((_, known),) = before.items()
        expected_ns = sum(known[signature_of(one)].mean_ns for one in captured.program.launches)
        assert run.lane_choice.sequential_ns == pytest.approx(expected_ns)
        torch.testing.assert_close(run(x), one_lane(x))
    assert costs.costs == before  # nothing was measured


def test_devices_are_planned_by_what_is_known(captured):
    costs = offload.LaunchCosts()
    devices = [CpuBackend(threads=1), CpuBackend(threads=1, duty=0.5)]
    for one in devices:
        learnt(costs, f"cpu, {one.machine().settings}, as calls take", captured.program)
    before = costs.costs
    assert set(before) == {
        "cpu, threads=1, duty=1.0, as calls take",
        "cpu, threads=1, duty=0.5, as calls take",
    }
    x = torch.randn(4, 32)
    with captured.load(devices, costs=costs) as run, captured.load() as one:
        assert run.explain().count("were kept from former loads") == len(devices)
        torch.testing.assert_close(run(x), one(x))
    assert costs.costs == before


def test_durations_of_another_machine_are_refused(captured, tmp_path):
    costs = offload.LaunchCosts(machine="another")
    with pytest.raises(offload.CostModelError, match="those of another"):
        captured.load(lanes=2, costs=costs)


@pytest.mark.parametrize("options", [{}, {"lanes": 1}, {"device": CpuBackend()}])
def test_a_load_that_plans_nothing_refuses_costs(captured, options):
    with pytest.raises(offload.BindingError, match="give it with lanes="):
        captured.load(costs=offload.LaunchCosts(), **options)


def test_something_else_is_refused(captured):
    with pytest.raises(offload.BindingError, match=r"expected offload\.LaunchCosts.*got a str"):
        captured.load(lanes=2, costs="costs.json")


def test_kernels_with_the_same_name_differ_by_what_they_replace():
    one = offload.capture(lambda x: (x * 2).relu(), torch.randn(4)).program
    two = offload.capture(lambda x: x.relu() * 2, torch.randn(4)).program

    def of(program):
        launch = dataclasses.replace(program.launches[0], callee=Kernel(0, program))
        return signature_of(launch)

    assert of(one) != of(two)
