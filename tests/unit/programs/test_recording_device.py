"""The device of a recording, found from its tensors; those of accelerators are stand-ins here."""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch
from torch import nn

import offload
from offload.errors import CaptureError
from offload.record import recording_device
from offload.record.recording_device import find_device


def tensors_on(*devices: str) -> list[object]:
    return [types.SimpleNamespace(device=torch.device(one)) for one in devices]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((), "cpu"),
        (("cpu", "cpu"), "cpu"),
        (("cpu", "cuda:1", "cuda:1"), "cuda:1"),
        (("meta", "cuda:0"), "cuda:0"),
    ],
)
def test_the_accelerator_among_the_tensors_is_the_device(devices, expected):
    assert find_device(tensors_on(*devices)) == torch.device(expected)


def test_two_accelerators_are_refused_by_name():
    with pytest.raises(CaptureError, match="lie on cuda:0, cuda:1: a program is recorded for one"):
        find_device(tensors_on("cuda:1", "cpu", "cuda:0"))


def test_an_input_elsewhere_is_refused_by_name():
    with pytest.raises(
        CaptureError, match=r"args\[1\] is on meta, and the model or another input on cpu"
    ):
        offload.capture(lambda x, y: x + y, torch.ones(3), torch.ones(3, device="meta"))


def test_a_weight_elsewhere_is_refused():
    model = nn.Linear(3, 3, device="meta")
    with pytest.raises(CaptureError, match=r"is on meta, but the recording is on cpu"):
        offload.capture(model, torch.ones(3))


def test_the_check_runs_on_the_device_of_the_recording(monkeypatch):
    """Launches without an index make their tensors on the current device, whichever it is."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def current(device: torch.device):
        entered.append(device)
        yield

    monkeypatch.setattr(sys.modules["offload.record.verify"], "current", current)
    offload.capture(torch.sin, torch.ones(3))
    assert entered == [torch.device("cpu")]


def test_the_current_device_of_an_accelerator_is_its_modules(monkeypatch):
    indices: list[int] = []

    @contextlib.contextmanager
    def device(index: int):
        indices.append(index)
        yield

    module = types.SimpleNamespace(device=device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    with (
        recording_device.current(torch.device("cuda", 1)),
        recording_device.current(torch.device("cpu")),
    ):
        assert indices == [1]


@pytest.mark.parametrize("is_capturing", [False, True])
def test_a_caller_who_captures_a_graph_is_refused_before_inputs_are_read(monkeypatch, is_capturing):
    """A read on the host would end that capture."""

    class Read(Exception):
        pass

    def samples(*_: object) -> None:
        raise Read

    device = torch.device("cuda", 1)
    module = types.SimpleNamespace(
        is_current_stream_capturing=lambda: is_capturing,
        device=lambda _: contextlib.nullcontext(),
    )
    watched = sys.modules["offload.record.watched_call"]
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(watched, "input_samples", samples)
    monkeypatch.setattr(watched, "recording_device", lambda *_: device)
    monkeypatch.setattr(watched, "may_be_host_constant", lambda _: True)  # on the CPU, as here
    expected = (
        pytest.raises(CaptureError, match="being captured on the current stream: record the call")
        if is_capturing
        else pytest.raises(Read)
    )
    with expected:
        offload.capture(torch.sin, torch.ones(3))


@pytest.mark.parametrize("captures", [0, 1])
def test_the_stream_of_the_recordings_own_device_is_asked(monkeypatch, captures):
    """Whichever device is torch's current one."""
    entered = [0]

    @contextlib.contextmanager
    def device(index: int):
        entered.append(index)
        yield
        entered.pop()

    module = types.SimpleNamespace(
        device=device, is_current_stream_capturing=lambda: entered[-1] == captures
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    expected = pytest.raises(CaptureError) if captures else contextlib.nullcontext()
    with expected:
        recording_device.refuse_capturing(torch.device("cuda", 1))


def test_a_runtime_without_captures_captures_nothing(monkeypatch):
    def fail() -> bool:
        raise RuntimeError("aclmdlRICaptureGetInfo was not found")

    module = types.SimpleNamespace(
        device=lambda _: contextlib.nullcontext(), is_current_stream_capturing=fail
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    recording_device.refuse_capturing(torch.device("cuda", 0))
