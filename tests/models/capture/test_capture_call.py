"""`capture(model, *args)` records that call at once, for scripts."""

from __future__ import annotations

import copy

import pytest
import torch
from checks import Weights, assert_same, normal
from torch import nn

import offload


@pytest.fixture
def linear() -> nn.Module:
    return nn.Linear(3, 2).eval()


def test_records_the_call_and_replays_others(linear):
    x, other = normal(4, 3), normal(4, 3)
    captured = offload.capture(linear, x)
    assert isinstance(captured, offload.Captured)
    assert [launch.name for launch in captured.program.launches] == ["aten::addmm"]
    with torch.no_grad():
        assert torch.equal(captured.recorded_result, linear(x))
        assert torch.equal(captured(other), linear(other))


def test_same_program_as_the_block(linear):
    x = normal(4, 3)
    with offload.capture(linear) as in_block:
        linear(x)
    called = offload.capture(linear, x)
    assert called.program.values == in_block.program.values
    assert called.program.parameter_names == in_block.program.parameter_names


def test_keywords_alone_are_arguments():
    def scaled(*, x, by=2.0):
        return x * by

    captured = offload.capture(scaled, x=normal(3))
    x = normal(3)
    assert torch.equal(captured(x=x), x * 2)


def test_parameters_named_like_the_first():
    def apply(function, model):
        return function * model

    captured = offload.capture(apply, normal(2), model=normal(2))
    x, y = normal(2), normal(2)
    assert torch.equal(captured(x, model=y), x * y)


def test_result_is_the_calls_own():
    x = normal(4)
    captured = offload.capture(lambda x: {"same": x, "double": [x * 2]}, x)
    assert captured.recorded_result["same"] is x
    assert torch.equal(captured.recorded_result["double"][0], x * 2)
    again = captured(normal(4))
    assert again["double"][0].data_ptr() != captured.recorded_result["double"][0].data_ptr()


def test_result_may_be_none():
    buffer = torch.zeros(2)

    def count(x):
        buffer.add_(x)

    captured = offload.capture(count, torch.ones(2))
    assert captured.recorded_result is None
    captured(torch.ones(2))
    assert torch.equal(buffer, torch.full((2,), 2.0))


def test_only_the_call_form_keeps_its_result(linear, tmp_path):
    with offload.capture(linear) as captured:
        linear(normal(1, 3))
    captured.save(tmp_path / "linear.offload")
    for one in (captured, offload.open(tmp_path / "linear.offload")):
        with pytest.raises(offload.CaptureError, match="keeps"):
            _ = one.recorded_result


def test_state_changes_once():
    model, x = nn.BatchNorm1d(3), normal(4, 3)
    twin = copy.deepcopy(model)
    captured = offload.capture(model, x)
    with torch.no_grad():
        for turn in range(3):
            expected = twin(x)
            got = captured.recorded_result if turn == 0 else captured(x)
            assert_same(got, expected)
            assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert not model._forward_hooks


def test_views_of_weights():
    model, x = Weights(), normal(2)
    assert_same(list(offload.capture(model, x)(x)), list(model(x)))


def test_guarded_reads():
    captured = offload.capture(lambda x: x * x.max().item(), torch.ones(2), host_reads="guard")
    with pytest.raises(offload.BindingError):
        captured(torch.zeros(2))


def test_host_reads_is_captures_own():
    """A model with a parameter of that name is captured in the block."""

    def reads(x, host_reads):
        return x + host_reads

    with pytest.raises(offload.CaptureError, match="host_reads: expected one of"):
        offload.capture(reads, normal(2), host_reads=normal(2))
    with offload.capture(reads) as captured:
        captured(normal(2), host_reads=normal(2))
    x, y = normal(2), normal(2)
    assert torch.equal(captured(x, host_reads=y), x + y)


def test_no_arguments_need_the_block():
    weight = normal(2)

    def double():
        return weight * 2

    block = offload.capture(double)
    with pytest.raises(TypeError, match="CaptureBlock"):
        block()  # not yet captured
    with block as captured:
        captured()
    assert torch.equal(captured(), weight * 2)


def test_refusals_are_raised_at_the_call(linear):
    with pytest.raises(offload.CaptureError, match=r"test_capture_call\.py:\d+: .*host"):
        offload.capture(lambda x: x * x.max().item(), normal(2))
    with pytest.raises(offload.CaptureError, match="function"):
        offload.capture(3, normal(2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        offload.capture(linear, normal(4, 5))
    with torch.no_grad():
        x = normal(4, 3)
        assert torch.equal(offload.capture(linear, x)(x), linear(x))


def test_capture_inside_a_captured_call():
    with pytest.raises(offload.CaptureError, match="inside a captured call"):
        offload.capture(lambda x: offload.capture(torch.sin, x)(x), normal(2))
