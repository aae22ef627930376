"""Errors of the user's own in a `capture` block, and what the block keeps of them: nothing."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from checks import assert_same, capture, normal
from failing_calls import (
    SWALLOWED,
    THROUGH,
    Linear,
    OwnError,
    in_block,
    is_whole,
    raised_with_cause,
    record,
)
from torch import nn

import offload

pytestmark = pytest.mark.usefixtures("nothing_stays")


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
