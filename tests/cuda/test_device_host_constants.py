"""Tensors of no dimensions on the CPU in models on a GPU, and the GPU of a program."""

from __future__ import annotations

import pytest
import torch
from on_device import full, ones, randn
from torch import nn

import offload

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("shift", torch.tensor(-1.0, dtype=torch.float64))
        self.linear = nn.Linear(16, 16).cuda()

    def forward(self, x, factor):
        moved = (self.scale * 3).to(x.device)
        return (self.linear(x) * self.scale + self.shift * 2) * factor + torch.tensor(0.25) - moved


def test_they_are_constants_that_each_execution_must_find():
    model, factor = Scaled(), torch.tensor(0.5)
    captured = offload.capture(model, ones(4, 16), factor)
    assert not any(launch.guard for launch in captured.program.launches)
    run = captured.load()
    x = randn(4, 16)
    torch.testing.assert_close(run(x, factor), model(x, factor))
    torch.testing.assert_close(run(x, factor.clone()), model(x, factor))
    with pytest.raises(offload.BindingError, match=r"args\[1\]: .* as 0\.5, got 0\.75"):
        run(x, torch.tensor(0.75))
    with pytest.raises(offload.BindingError, match=r"args\[1\]: expected a tensor on cpu"):
        run(x, factor.cuda())
    with torch.no_grad():
        model.scale.add_(1)
    with pytest.raises(offload.BindingError, match=r"scale: .* as 2\.5, got 3\.5"):
        run(x, factor)
    model.scale.data = torch.tensor(2.5)
    torch.testing.assert_close(run(x, factor), model(x, factor))
    model.scale.data = torch.tensor(2.5).cuda()
    with pytest.raises(offload.BindingError, match=r"scale: expected a tensor on the CPU"):
        run(x, factor)


def test_the_recorded_values_are_captured_whatever_they_are_at_load():
    model, factor, x = Scaled(), torch.tensor(0.5), randn(4, 16)
    captured = offload.capture(model, x, factor)
    expected = captured.recorded_result.clone()
    with torch.no_grad():
        model.scale.fill_(100)
    run = captured.load()
    with torch.no_grad():
        model.scale.fill_(2.5)
    torch.testing.assert_close(run(x, factor), expected)


def test_saved_and_opened(tmp_path):
    model, factor, x = Scaled(), torch.tensor(0.5), randn(4, 16)
    offload.capture(model, x, factor).save(tmp_path / "m.offload")
    opened = offload.open(tmp_path / "m.offload")
    torch.testing.assert_close(opened(x, factor), model(x, factor))
    with pytest.raises(offload.BindingError, match="got 1"):
        opened(x, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x * torch.rand(()), "draws random numbers there"),
        (lambda x: x * x.sum().cpu(), "computes it from tensors that are not constants"),
        (lambda x: (x, torch.tensor(1.0)), "a result is constant, a tensor on the CPU"),
        (lambda x: x.sum() * torch.ones(3).sum(), "only tensors of no dimensions may be on"),
    ],
)
def test_what_else_is_on_the_cpu_is_refused(function, message):
    with pytest.raises(offload.CaptureError, match=message):
        offload.capture(function, ones(8))


@two_devices
def test_a_program_without_weights_runs_where_it_was_recorded():
    x = torch.ones(8, device="cuda:1")
    captured = offload.capture(lambda x: torch.relu(x * 2 + 1), x)
    assert captured.program.device_index == 1
    assert captured(x).device == torch.device("cuda:1")
    assert torch.equal(captured(x), x * 2 + 1)
    with pytest.raises(offload.BackendUnavailable, match="are on cuda:1"):
        captured.load("cuda:0")
    with pytest.raises(offload.BindingError, match="expected a tensor on cuda:1"):
        captured(ones(8))


@two_devices
def test_a_file_is_opened_on_the_current_device(tmp_path):
    offload.capture(lambda x: x * 2 + 1, full((8,), 3.0)).save(tmp_path / "m.offload")
    with torch.cuda.device(1):
        opened = offload.open(tmp_path / "m.offload")
    x = torch.ones(8, device="cuda:1")
    assert torch.equal(opened.load("cuda:1")(x), x * 2 + 1)


def test_a_device_that_is_not_there_is_told():
    captured = offload.capture(lambda x: x * 2, ones(8))
    index = torch.cuda.device_count()
    with pytest.raises(offload.BackendUnavailable, match=f"run it on cuda:{index}, capture"):
        captured.load(f"cuda:{index}")
