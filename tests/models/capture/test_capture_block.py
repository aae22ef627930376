"""The with-block: exactly one call, made in any way, and the resulting Program."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from checks import Weights, assert_same, capture, normal, refusal
from torch import nn

import offload

HERE = "test_capture_block.py:"


def test_no_call():
    with (
        pytest.raises(offload.CaptureError, match=r"call model\(x\)"),
        offload.capture(nn.Linear(1, 1)),
    ):
        pass
    with (
        pytest.raises(offload.CaptureError, match=r"call captured\(x\) \(the handle of"),
        offload.capture(torch.sin),
    ):
        pass


@pytest.mark.parametrize("first", ["model", "handle"])
@pytest.mark.parametrize("second", ["model", "handle"])
def test_two_calls(first, second):
    model = nn.Linear(2, 2)
    with torch.no_grad(), offload.capture(model) as captured:
        (model if first == "model" else captured)(normal(1, 2))
        with pytest.raises(offload.CaptureError, match="twice"):
            (model if second == "model" else captured)(normal(1, 2))


def test_capture_inside_a_captured_call():
    def function(x):
        with offload.capture(torch.sin) as inner:
            inner(x)
        return x

    assert "inside" in refusal(function, normal(2))


def test_executing_another_program_inside_a_captured_call():
    """The inner launches are invisible to the recorder."""
    inner = capture(lambda x: x.sin() * 2, normal(3))
    refusal(lambda x: inner(x) + 1, normal(3))
    run, target = inner.load(), torch.zeros(3)
    refusal(lambda x: run(x, out=target) + 1, normal(3))

    def into_closure(x):
        run(x, out=target)
        return target + 1

    refusal(into_closure, normal(3))
    refusal(lambda x: inner.load().submit(x).result() + 1, normal(3))


def test_not_callable():
    with pytest.raises(offload.CaptureError, match="function"), offload.capture(3):
        pass


def test_call_before_anything_is_recorded():
    with pytest.raises(offload.CaptureError), offload.capture(nn.Linear(1, 1)) as captured:
        _ = captured.program


def test_program_of_another_device():
    with pytest.raises(offload.CaptureError, match="meta"), offload.capture(torch.sin) as captured:
        captured(torch.empty(2, device="meta"))


class OwnError(Exception):
    pass


@pytest.mark.parametrize("through", ["model", "handle"])
def test_exception_in_the_forward(through):
    model = nn.Linear(2, 2)
    forward = model.forward

    def fail(x):
        forward(x)
        raise OwnError

    model.forward = fail
    with pytest.raises(OwnError), torch.no_grad(), offload.capture(model) as captured:
        (model if through == "model" else captured)(normal(1, 2))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.compiler.is_compiling()
    assert not model._forward_hooks
    del model.forward
    captured = capture(model, normal(1, 2))
    x = normal(1, 2)
    with torch.no_grad():
        assert_same(captured(x), model(x), tolerance=1e-6)


def test_second_try_in_the_same_block():
    model = nn.Linear(2, 2)
    fails = iter([True, False])
    model.register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(OwnError()) if next(fails) else None
    )
    with torch.no_grad(), offload.capture(model) as captured:
        with pytest.raises(OwnError):
            model(normal(1, 2))
        model(normal(1, 2))
    x = normal(1, 2)
    with torch.no_grad():
        assert_same(captured(x), nn.functional.linear(x, model.weight, model.bias), tolerance=1e-6)


def test_capture_inside_an_except_block():
    """An exception that is being handled is not the forward's."""
    model = nn.Linear(2, 2)
    try:
        raise OwnError
    except OwnError:
        with torch.no_grad(), offload.capture(model) as captured:
            model(normal(1, 2))
    assert captured.program.launches


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, depth=3):
        return self.linear(x) if depth == 0 else self(x * 2, depth - 1) + 1


@pytest.mark.parametrize("through", ["model", "handle"])
def test_recursion(through):
    model = Recursive()
    with torch.no_grad(), offload.capture(model) as captured:
        (model if through == "model" else captured)(normal(1, 2))
    x = normal(1, 2)
    with torch.no_grad():
        assert_same(captured(x), model(x), tolerance=1e-6)


@pytest.mark.parametrize("through", ["model", "handle"])
def test_user_hooks(through):
    """Hooks on the model and on its children are part of the call."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.register_forward_hook(lambda module, args, result: result + 1)
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    twin = copy.deepcopy(model)
    with torch.no_grad(), offload.capture(model) as captured:
        (model if through == "model" else captured)(normal(1, 2))
    x = normal(1, 2)
    with torch.no_grad():
        assert_same(captured(x), twin(x), tolerance=1e-6)


def test_methods_and_partials():
    model = Weights()
    bound = capture(model.forward, normal(2))
    x = normal(2)
    with torch.no_grad():
        assert_same(list(bound(x)), list(model(x)))
    partial = capture(functools.partial(torch.add, alpha=3), normal(2), normal(2))
    y = normal(2)
    assert torch.equal(partial(x, y), torch.add(x, y, alpha=3))


# ---- the Program ---------------------------------------------------------------------------------


def test_frozen_data():
    captured = capture(lambda x: x * 2, normal(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        captured.program.device = "cuda"


def test_dead_launches_are_gone_and_views_are_free():
    def function(x):
        _ = (x * 5).exp()
        return x.view(2, 2).t().reshape(-1)[None] + 1

    captured = capture(function, normal(4))
    operators = [launch.name for launch in captured.program.launches]
    assert operators == ["aten::clone", "aten::add.Tensor"]
    text = str(captured.program)
    assert "aten::add.Tensor" in text
    assert HERE in text


def test_program_prints():
    captured = capture(nn.Linear(2, 3), normal(1, 2))
    text = str(captured.program)
    assert "weight" in text
    assert "aten::addmm" in text
    assert "return" in text
