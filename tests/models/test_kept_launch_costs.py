"""`load(costs=)`: durations of launches from former loads take the place of timing them again."""

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


def test_lanes_are_planned_by_what_is_known(captured, tmp_path):
    path = tmp_path / "costs.json"
    costs = offload.LaunchCosts(path)
    for n_loads in (1, 2, 3):
        with captured.load(lanes=2, costs=costs) as run:
            assert not run.lane_choice.kept
        assert n_measurements(costs) <= {n_loads, 1}  # an outlier may have started anew
    for _ in range(10):  # on a busy machine some signature may still be unknown
        if all(one.is_known for known in costs.costs.values() for one in known.values()):
            break
        captured.load(lanes=2, costs=costs).close()
    costs.save()
    again = offload.LaunchCosts(path)
    x = torch.randn(4, 32)
    with captured.load(lanes=2, costs=again) as run, captured.load() as one_lane:
        assert run.lane_choice.kept
        assert "kept from former loads" in run.explain()
        ((device, known),) = again.costs.items()
        assert device == "cpu, one thread for a launch"
        expected_ns = sum(
            known[signature_of(launch)].mean_ns for launch in captured.program.launches
        )
        assert run.lane_choice.sequential_ns == pytest.approx(expected_ns)
        torch.testing.assert_close(run(x), one_lane(x))
    assert n_measurements(again) == n_measurements(costs)  # nothing was measured


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
