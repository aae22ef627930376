"""Errors of a `capture` block: the original error, and no leftovers of the recording."""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref

import pytest
import torch
from checks import assert_same, capture, normal
from torch import nn

import offload
from offload import errors
from offload.api import block_recording
from offload.api.recording_turn import is_recording
from offload.record import watched_call
from offload.record.launches import LaunchRecorder

TYPES = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, offload.OffloadError)
]
THROUGH = pytest.mark.parametrize("through", ["model", "handle"])
SWALLOWED = pytest.mark.parametrize("swallowed", [False, True])


class OwnError(Exception):
    pass


class Linear(nn.Linear):
    """Runs an action of the test after its launch."""

    def __init__(self, then):
        super().__init__(2, 2)
        self.then = (then,)  # not an attribute that the recorder inspects

    def forward(self, x):
        y = super().forward(x)
        self.then[0](y)
        return y


@pytest.fixture(autouse=True)
def nothing_stays():
    """Modes, flags, hooks and generators are torch's own again after each test."""
    lookups = torch.overrides.has_torch_function, torch.compiler.is_compiling
    generator, cache = torch.random.default_generator, torch.is_autocast_cache_enabled()
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.overrides._get_current_function_mode_stack()
    assert (torch.overrides.has_torch_function, torch.compiler.is_compiling) == lookups
    assert not torch.compiler.is_compiling()
    assert torch.random.default_generator is generator
    assert torch.is_autocast_cache_enabled() == cache
    assert not is_recording()
    function, x = torch.sin, normal(2)
    assert torch.equal(capture(function, x)(x), x.sin())


def in_block(model, through, *, swallowed, x=None):
    """One call in a block, whose own code may suppress its error."""
    x = normal(1, 2) if x is None else x
    with (
        torch.no_grad(),
        offload.capture(model) as captured,
        contextlib.suppress(Exception) if swallowed else contextlib.nullcontext(),
    ):
        (model if through == "model" else captured)(x)


def record(model, through, *, swallowed, x=None):
    """Return the error of such a block."""
    try:
        in_block(model, through, swallowed=swallowed, x=x)
    except BaseException as error:
        assert not getattr(model, "_forward_hooks", None)
        assert not getattr(model, "_forward_pre_hooks", None)
        return error
    raise AssertionError("nothing was raised")


def raised_with_cause(kind):
    """An error with cause, context and notes."""
    error = kind("said once")
    error.__cause__ = KeyError("why")
    error.__context__ = IndexError("meanwhile")
    error.add_note("a note")
    return error


def is_whole(error):
    return (
        isinstance(error.__cause__, KeyError)
        and isinstance(error.__context__, IndexError)
        and error.__notes__[0] == "a note"
        and str(error) == "said once"
    )


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


@THROUGH
@pytest.mark.parametrize("kind", [OwnError, KeyboardInterrupt, SystemExit, StopIteration])
def test_an_error_of_the_users_own_goes_through(through, kind):
    error = raised_with_cause(kind)

    def fail(_):
        raise error

    assert record(Linear(fail), through, swallowed=False) is error
    assert is_whole(error)
    assert error.__notes__ == ["a note"]


@THROUGH
def test_an_error_of_the_users_own_that_the_block_swallows(through):
    error = raised_with_cause(OwnError)

    def fail(_):
        raise error

    raised = record(Linear(fail), through, swallowed=True)
    assert type(raised) is offload.CaptureError
    assert raised.__cause__ is error
    assert "OwnError: said once" in str(raised)


@THROUGH
def test_an_error_of_the_block_beside_the_call_goes_through(through):
    """Also after a refusal that the block swallowed, and while that is being handled."""
    model = Linear(lambda y: y.sum().item())
    error = OwnError("stop")

    def stops():
        with torch.no_grad(), offload.capture(model) as captured:
            try:
                (model if through == "model" else captured)(normal(1, 2))
            except offload.CaptureError as refused:
                raise error from refused

    with pytest.raises(OwnError) as caught:
        stops()
    assert caught.value is error
    assert isinstance(error.__cause__, offload.CaptureError)
    assert not model._forward_hooks


@THROUGH
def test_an_interrupt_is_no_refusal(through):
    """Though an earlier refusal exists."""

    def interrupted(y):
        with contextlib.suppress(offload.CaptureError):
            y.sum().item()
        raise KeyboardInterrupt

    assert type(record(Linear(interrupted), through, swallowed=False)) is KeyboardInterrupt


def test_an_interrupted_call_whose_interrupt_is_swallowed():
    """torch calls no hook after an interrupt: the block ends the recording."""

    def interrupted(_):
        raise KeyboardInterrupt

    model = Linear(interrupted)
    with (
        pytest.raises(offload.CaptureError, match="interrupted"),
        offload.capture(model),
        contextlib.suppress(KeyboardInterrupt),
    ):
        model(normal(1, 2))
    assert not model._forward_hooks


@THROUGH
def test_the_last_of_several_calls_counts(through):
    """A later call may succeed, and then nothing is raised."""
    failures = [OwnError("first"), offload.PlanError("second")]
    model = Linear(lambda _: _raise(failures.pop(0)) if failures else None)

    def both_fail():
        with torch.no_grad(), offload.capture(model) as captured:
            for _ in range(2):
                with contextlib.suppress(Exception):
                    (model if through == "model" else captured)(normal(1, 2))

    with pytest.raises(offload.PlanError, match="second"):
        both_fail()
    failures = [OwnError("first")]
    with torch.no_grad(), offload.capture(model) as captured:
        with contextlib.suppress(OwnError):
            (model if through == "model" else captured)(normal(1, 2))
        (model if through == "model" else captured)(normal(1, 2))
    x = normal(1, 2)
    with torch.no_grad():
        assert_same(captured(x), model(x), tolerance=1e-6)


def _raise(error):
    raise error


@THROUGH
@SWALLOWED
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_block_keeps_no_error(through, swallowed, wrapped):
    """Its traceback has the frames of the model, and so its tensors."""

    def refused(y):
        held.append(weakref.ref(y))
        try:
            y.sum().item()
        except offload.CaptureError as one:
            if wrapped:
                raise OwnError("no sum") from one
            raise

    held: list[weakref.ref] = []
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(offload.CaptureError):
            in_block(Linear(refused), through, swallowed=swallowed)
        assert [one() for one in held] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_call_is_given_goes_without_the_collector(fails):
    """On a device it may be most of the memory."""

    def function(x):
        if fails:
            raise OwnError
        return {"y": (x["x"] + 1)}

    gc.collect()
    gc.disable()
    try:
        x = normal(2)
        given = weakref.ref(x)
        with contextlib.suppress(OwnError):
            returned = weakref.ref(offload.capture(function, {"x": x}).recorded_result["y"])
            assert returned() is None
        del x
        assert given() is None
    finally:
        gc.enable()


def test_loading_inside_of_the_block():
    """A load's error is also raised unchanged, and the recording stays valid."""
    model = nn.Linear(2, 2)
    with torch.no_grad(), offload.capture(model) as captured:
        with pytest.raises(offload.CaptureError, match="nothing is recorded yet"):
            captured.load()
        model(normal(1, 2))
        with pytest.raises(offload.BackendUnavailable):
            captured.load("cuda")
        with pytest.raises(offload.BindingError, match="scheduling"):
            captured.load(scheduling="no such")
        assert captured.load(scheduling="auto").scheduling == "offload"
        run = captured.load()
    x = normal(1, 2)
    with torch.no_grad():
        assert_same(run(x), model(x), tolerance=1e-6)


@SWALLOWED
def test_loading_that_fails_inside_of_a_recorded_call(swallowed):
    other = capture(torch.sin, normal(2))

    def loads(_):
        other.load("no such device")

    error = record(Linear(loads), "model", swallowed=swallowed)
    assert type(error) is offload.BackendUnavailable
