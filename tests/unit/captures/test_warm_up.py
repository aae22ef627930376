"""A failing warm-up names the launch or the device, and a remedy; on the CPU as a device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch_pools import FakeAllocator, take_for_devices

import offload
from offload.backends.captured import torch_warm_up
from offload.backends.captured.torch_warm_up import warm_up
from offload.program import BoundProgram

CPU = torch.device("cpu")


def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, index).sin()


def with_samples(bound: BoundProgram, samples: tuple[bytes, ...]) -> BoundProgram:
    bindings = dataclasses.replace(bound.bindings, input_samples=samples)
    return dataclasses.replace(bound, bindings=bindings)


@pytest.fixture
def bound() -> BoundProgram:
    return offload.capture(look_up, torch.randn(4, 3), torch.tensor([3, 1])).bound


@pytest.fixture
def device(monkeypatch) -> FakeAllocator:
    """Adds what torch's module of a device has and the CPU's lacks."""
    return take_for_devices(monkeypatch)


def test_each_launch_runs_once_and_workspaces_go_last(bound, device):
    seen: list[object] = []
    warm_up(
        bound, CPU, None,
        free_workspaces=lambda: seen.append("workspaces"),
        launching=lambda launch: seen.append(launch.index),
    )  # fmt: skip
    assert seen == [0, 1, "workspaces"]


def test_inputs_buffers_and_weights_stay_as_they_were(device):
    """The model itself writes all of them."""

    class Writing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)
            self.scale = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            with torch.no_grad():
                x.mul_(2)
                self.scale.add_(1)
                return self.norm(x) * self.scale

    model = Writing().train()
    bound = offload.capture(model, torch.randn(4, 3)).bound
    state = {name: one.clone() for name, one in model.state_dict().items()}
    x = torch.randn(4, 3)
    before = x.clone()
    for given in ([x], None):
        warm_up(bound, CPU, given)
    assert torch.equal(x, before)
    for name, one in model.state_dict().items():
        assert torch.equal(one, state[name]), name


def test_a_launch_that_fails_is_named(bound, device):
    given = [torch.randn(4, 3), torch.tensor([3, 9])]
    with pytest.raises(
        offload.CaptureError,
        match=r"test_warm_up.py:\d+.*: aten::index_select failed in the warm-up, which runs on the "
        r"inputs that were given \(the model must support them\): .*out of range",
    ) as raised:
        warm_up(bound, CPU, given)
    assert isinstance(raised.value.__cause__, (IndexError, RuntimeError))


@pytest.mark.parametrize(
    ("cause", "kind", "match"),
    [
        (
            torch.OutOfMemoryError("too large\nadvice"),
            offload.OutOfMemory,
            "memory .*: too large$",
        ),
        (torch.AcceleratorError("a fault"), offload.ExecutionError, "device failed .*new process"),
    ],
)
def test_a_launch_at_which_the_device_fails_is_no_refusal(
    bound, device, monkeypatch, cause, kind, match
):
    def fail(*_):
        raise cause

    monkeypatch.setattr(torch_warm_up.EagerRun, "call", fail)
    with pytest.raises(kind, match=r"^.*test_warm_up.py:\d+.*" + match) as raised:
        warm_up(bound, CPU, None)
    assert type(raised.value) is kind
    assert raised.value.__cause__ is cause


def test_an_error_of_offload_in_a_launch_stays_as_it_is(bound, device, monkeypatch):
    error = offload.BindingError("of another executable")

    def fail(*_):
        raise error

    monkeypatch.setattr(torch_warm_up.EagerRun, "call", fail)
    with pytest.raises(offload.BindingError) as raised:
        warm_up(bound, CPU, None)
    assert raised.value is error
    assert "aten::index_select, in the warm-up" in error.__notes__[0]


def test_inputs_that_were_recorded_are_what_runs(device):
    """Integers are divided, which the CPU refuses for zero."""
    bound = offload.capture(torch.floor_divide, torch.tensor([6]), torch.tensor([3])).bound
    warm_up(bound, CPU, None)
    of_a_file = with_samples(bound, ())
    with pytest.raises(
        offload.CaptureError,
        match=r"aten::floor_divide failed in the warm-up, which runs on made-up inputs \(numbers "
        r"between 0 and 1, every integer 0: a file holds no inputs\) \(the model must",
    ):
        warm_up(of_a_file, CPU, None)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda: torch.ones(2).sum(), (), "no inputs, since the model has none"),
        (
            lambda x, y: x + y,
            (torch.ones(2), torch.ones(2)),
            r"the inputs of the recorded call \(their first bytes, repeated in large ones\)",
        ),
        (
            lambda x, y, z: x + y + z,
            (torch.zeros(2), torch.zeros(2).long(), torch.zeros(2)),
            r"the inputs of the recorded call \(their first bytes, repeated in large ones; numbers "
            r"near 0 for those that were all 0: args\[0\], args\[2\]\)",
        ),
        (
            lambda x: x + 1,
            (torch.empty(0),),
            r"the inputs of the recorded call \(their first bytes, repeated in large ones\)",
        ),
    ],
)
def test_what_ran_is_named(device, function, inputs, expected):
    with offload.capture(function) as captured:
        captured(*inputs)
    device.fault = "a fault"
    with pytest.raises(offload.ExecutionError, match=f"which runs on {expected}: a fault"):
        warm_up(captured.bound, CPU, None)


def test_inputs_that_had_no_content_are_not_said_to_be_a_files(bound, device):
    device.fault = "a fault"
    without = with_samples(bound, (b"",) * len(bound.program.inputs))
    with pytest.raises(offload.ExecutionError, match="those of the recorded call had no content"):
        warm_up(without, CPU, None)


def test_a_device_that_fails_is_told(bound, device):
    device.fault = "an illegal memory access was encountered\nadvice of torch"
    with pytest.raises(
        offload.ExecutionError,
        match=r"^the device failed in the warm-up, which runs on the inputs of the recorded call "
        r".*: an illegal memory access was encountered; a device that has faulted can be used "
        r"again in a new process$",
    ):
        warm_up(bound, CPU, None)


def test_a_failed_warm_up_gives_its_memory_back_while_its_error_is_held(bound, device):
    with pytest.raises(offload.CaptureError) as raised:
        warm_up(bound, CPU, [torch.randn(4, 3), torch.tensor([3, 9])])
    assert device.ended == [0]
    assert raised.value.__traceback__ is not None
