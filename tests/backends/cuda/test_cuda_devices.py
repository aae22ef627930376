"""Launches on the CPU and on a simulated GPU: each segment is executed by its own backend."""

import pytest
import torch
from on_lanes import Towers

import offload
from offload.backends import CpuBackend
from offload.load import device_times
from offload.load import devices as device_loading

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from simulated_backend import install


def let_launches_take(monkeypatch, period):
    """Make launches alternately expensive on one device and cheap on the other."""

    def launch_ns(self, at):
        n_launches = len(self.bound.program.launches)
        return [1e6 if index // period % 2 == at else 1e3 for index in range(n_launches)]

    monkeypatch.setattr(device_times.DeviceTimes, "launch_ns", launch_ns)
    monkeypatch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)


@torch.no_grad()
def test_segments_on_the_cpu_and_a_gpu(simulator, monkeypatch):
    gpu = install(simulator, monkeypatch)
    let_launches_take(monkeypatch, 4)
    model, x = Towers(16, 4), torch.randn(4, 16)
    run = offload.capture(model, x).load([CpuBackend(threads=1), gpu])
    assert {one.costs.planned for one in run.segments} == {0, 1}
    assert "on cuda-simulated" in run.explain()
    inputs = [torch.randn(4, 16) for _ in range(6)]
    for one in inputs:
        assert torch.equal(run(one), model(one))
    assert all(map(torch.equal, run.map(inputs, buffersize=4), map(model, inputs)))
    run.close()


@torch.no_grad()
def test_the_costs_of_both_are_asked_for(simulator, monkeypatch):
    gpu = install(simulator, monkeypatch)
    model, x = Towers(16, 2), torch.randn(4, 16)
    run = offload.capture(model, x).load([CpuBackend(threads=1), gpu])
    assert all(None not in task.costs_ns for task in run.placement.graph.tasks)
    assert torch.equal(run(x), model(x))
    run.close()
