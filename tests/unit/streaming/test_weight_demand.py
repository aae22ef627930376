import dataclasses

import pytest
import safetensors.torch
import torch

import offload
from offload.errors import PlanError
from offload.plan import weight_demand
from offload.program import Role


def program_of(function, *inputs):
    return offload.capture(function, *inputs).program


def test_readers_in_order():
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second, first)
    program = program_of(model, torch.randn(2, 8))
    times = [float(index) for index in range(len(program.launches))]
    demand = weight_demand(program, times)
    assert demand.launch_ns == tuple(times)
    assert [one.value for one in demand.weights] == [
        value.index for value in program.of_role(Role.WEIGHT)
    ]
    found = {one.name: one for one in demand.weights}
    shared = next(one for name, one in found.items() if name.endswith("0.weight"))
    assert len(shared.launches) == 2
    assert shared.size_bytes == 8 * 8 * 4
    for one in demand.weights:
        assert not one.stays
        assert one.launches == tuple(
            launch.index for launch in program.launches if one.value in launch.reads
        )


def test_what_a_launch_writes_or_the_result_shows_stays():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.register_buffer("shown", torch.ones(4))
            self.register_buffer("read", torch.ones(4))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count + self.read + self.shown, self.shown

    program = program_of(Counting(), torch.randn(4))
    demand = weight_demand(program, [1.0] * len(program.launches))
    stays = {one.name.split(".")[-1]: one.stays for one in demand.weights}
    assert stays == {"count": True, "shown": True, "read": False}


def test_a_weight_that_no_launch_reads_stays():
    program = program_of(torch.nn.Linear(8, 8), torch.randn(2, 8))
    launches = tuple(dataclasses.replace(one, reads=()) for one in program.launches)
    program = dataclasses.replace(program, launches=launches)
    demand = weight_demand(program, [1.0] * len(launches))
    assert [(one.launches, one.stays) for one in demand.weights] == [((), True)] * 2


def test_what_is_in_memory_beside_weights_in_files_stays(tmp_path):
    class Scaled(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("scale", torch.rand(8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = Scaled()
    safetensors.torch.save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    captured = offload.capture(model, torch.randn(2, 8), weights=tmp_path)
    n_launches = len(captured.program.launches)
    stored = captured.bindings.stored.keys()
    demand = weight_demand(captured.program, [1.0] * n_launches, stored)
    stays = {one.name: one.stays for one in demand.weights}
    assert stays == {"weight": False, "bias": False, "scale": True}


def test_one_time_for_each_launch():
    program = program_of(torch.nn.Linear(8, 8), torch.randn(2, 8))
    with pytest.raises(PlanError, match="expected the times of 1 launches, got 2"):
        weight_demand(program, [1.0, 2.0])
