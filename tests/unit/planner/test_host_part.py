"""Constants of sizes: the part of them that the host makes."""

from __future__ import annotations

import torch
from torch.export import Dim

import offload
from offload.backends.dispatched.host_part import split_constants
from offload.interpreter.settled_family import SizeConstants

N = Dim("n", min=2, max=64)


def constants(function, *args) -> SizeConstants:
    with torch.no_grad():
        captured = offload.capture(function, *args, dynamic_shapes=({0: N},))
    found = captured._settled.constants
    assert found is not None
    return found


def names(part: SizeConstants) -> list[str]:
    return [launch.name.removeprefix("aten::") for launch in part.program.launches]


def test_integers_and_booleans_are_for_the_host_and_what_is_made_of_them_for_the_device():
    def masked(x):
        n = x.shape[0]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        angles = (torch.arange(n) * 2 + 1).float().cos()
        return x @ x.T + mask + angles

    split = split_constants(constants(masked, torch.randn(9, 4)))
    assert split is not None
    assert names(split.on_host) == ["ones", "triu", "arange", "mul.Tensor", "add.Tensor"]
    assert names(split.on_device) == ["_to_copy", "cos"]
    assert split.on_host.program.device == "cpu"
    values = split.on_device.program.values
    assert [values[one].dtype for one in split.copied] == ["bool", "int64"]
    assert [values[one].dtype for one in split.on_device.results] == ["bool", "float32"]
    made = {view.value for launch in split.on_host.program.launches for view in launch.made()}
    assert set(split.on_host.results) <= made


def test_what_may_differ_or_fail_on_the_host_stays_on_the_device():
    def ordered(x):
        n = x.shape[0]
        order = torch.arange(n).flip(0).sort()[1]
        return x[:, 0] + order + torch.arange(n) // torch.arange(n).clamp(min=1)

    split = split_constants(constants(ordered, torch.randn(9, 4)))
    assert split is not None
    assert "sort" not in names(split.on_host)
    assert "floor_divide" not in names(split.on_host)
    assert {"sort", "floor_divide"} <= set(names(split.on_device))


def test_reals_alone_are_not_split():
    def filled(x):
        return x * torch.full((x.shape[0], 1), 0.5).cos()

    assert split_constants(constants(filled, torch.randn(9, 4))) is None
