"""Errors of launches and checks of a `capture` block are the original errors."""

from __future__ import annotations

import contextlib
import traceback

import pytest
import torch
from checks import normal
from failing_calls import SWALLOWED, THROUGH, Linear, OwnError, is_whole, raised_with_cause, record
from torch import nn

import offload
from offload import errors
from offload.api import block_recording
from offload.record import watched_call
from offload.record.launches import LaunchRecorder

TYPES = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, offload.OffloadError)
]


pytestmark = pytest.mark.usefixtures("nothing_stays")


@THROUGH
@SWALLOWED
@pytest.mark.parametrize("kind", TYPES)
def test_an_error_in_the_forward_is_itself(through, swallowed, kind):
    error = raised_with_cause(kind)

    def fail(_):
        raise error

    assert record(Linear(fail), through, swallowed=swallowed) is error
    assert is_whole(error)
    assert error.__notes__ == ["a note"]
    assert any("in fail" in line for line in traceback.format_exception(error))


@THROUGH
@SWALLOWED
@pytest.mark.parametrize("kind", TYPES)
def test_an_error_of_a_launch_is_itself(monkeypatch, through, swallowed, kind):
    """Also where the model's code wraps it, or continues without the launch."""
    error = raised_with_cause(kind)

    class Failing(LaunchRecorder):
        def _after_launch(self, operator, *rest):
            if operator.name == "aten::sin":
                raise error
            super()._after_launch(operator, *rest)

    monkeypatch.setattr(watched_call, "LaunchRecorder", Failing)
    assert record(Linear(torch.sin), through, swallowed=swallowed) is error
    assert is_whole(error)
    assert error.__notes__ == ["a note"]

    def goes_on(y):
        with contextlib.suppress(Exception):
            torch.sin(y)

    assert record(Linear(goes_on), through, swallowed=swallowed) is error
    assert is_whole(error)

    def wraps(y):
        try:
            torch.sin(y)
        except Exception as one:
            raise OwnError("no sine") from one

    assert record(Linear(wraps), through, swallowed=swallowed) is error
    assert is_whole(error)
    assert error.__notes__[1:] == ["the call went on to raise OwnError: no sine"]


@THROUGH
@SWALLOWED
@pytest.mark.parametrize("kind", TYPES)
def test_an_error_of_the_check_is_itself(monkeypatch, through, swallowed, kind):
    error = raised_with_cause(kind)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(block_recording, "recorded_program", fail)
        assert record(Linear(id), through, swallowed=swallowed) is error
    assert is_whole(error)


LIBRARY = torch.library.Library("capture_errors", "FRAGMENT")


LIBRARY.define("second_time(Tensor x) -> Tensor")

second_time: list[BaseException] = []


@torch.library.impl(LIBRARY, "second_time", "CPU")
def _second_time(x):
    if second_time:
        raise second_time[0]
    return x * 2


@pytest.mark.parametrize("kind", TYPES)
def test_an_error_of_an_operator_that_is_run_again_is_itself(monkeypatch, kind):
    """And names its line."""
    error = raised_with_cause(kind)
    check = block_recording.recorded_program

    def run_again(*given):
        second_time.append(error)
        try:
            return check(*given)
        finally:
            second_time.clear()

    def function(x):
        return torch.ops.capture_errors.second_time(x)

    with monkeypatch.context() as patch:
        patch.setattr(block_recording, "recorded_program", run_again)
        assert record(function, "handle", swallowed=False) is error
    assert is_whole(error)
    assert "test_capture_errors.py:" in error.__notes__[1]
    assert "capture_errors::second_time" in error.__notes__[1]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (torch.OutOfMemoryError("no memory for 2 GiB"), offload.OutOfMemory),
        (torch.AcceleratorError("fault at 2 GiB"), offload.ExecutionError),
        (RuntimeError("not of 2 GiB"), offload.CaptureError),
    ],
)
def test_a_device_that_fails_when_it_is_run_again(monkeypatch, cause, kind):
    check = block_recording.recorded_program

    def run_again(*given):
        second_time.append(cause)
        try:
            return check(*given)
        finally:
            second_time.clear()

    with monkeypatch.context() as patch:
        patch.setattr(block_recording, "recorded_program", run_again)
        error = record(torch.ops.capture_errors.second_time, "handle", swallowed=False)
    assert type(error) is kind
    assert error.__cause__ is cause
    assert "2 GiB" in str(error)


@THROUGH
@SWALLOWED
def test_an_argument_that_is_refused(through, swallowed):
    error = record(Linear(id), through, swallowed=swallowed, x=torch.zeros(2, 2).to_sparse())
    assert type(error) is offload.CaptureError
    assert "sparse" in str(error)


@THROUGH
@SWALLOWED
def test_a_result_that_is_refused(through, swallowed):
    class Opaque(Linear):
        def forward(self, x):
            return {super().forward(x)}

    error = record(Opaque(id), through, swallowed=swallowed)
    assert type(error) is offload.CaptureError
    assert "result" in str(error)


@THROUGH
@SWALLOWED
def test_weights_that_are_in_no_file(tmp_path, through, swallowed):
    import safetensors.torch

    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(2, 2)}, path)
    model = nn.Linear(2, 2)
    with (
        pytest.raises(offload.FileError, match="bias"),
        offload.capture(model, weights=path) as captured,
        contextlib.suppress(Exception) if swallowed else contextlib.nullcontext(),
    ):
        (model if through == "model" else captured)(normal(1, 2))
    assert not model._forward_hooks
    with torch.no_grad():
        model(normal(1, 2))
