"""Executables inside code that traces or transforms calls: refused, never a traced constant."""

import contextlib

import pytest
import torch
from checks import assert_same, capture, normal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import offload


class Around(nn.Module):
    """A model that calls a function with its input, or with a tensor that it holds."""

    def __init__(self, inner, *, held):
        super().__init__()
        self.inner = inner
        self.register_buffer("held", normal(4) if held else None)

    def forward(self, x):
        return x + self.inner(x if self.held is None else self.held)


def tangent(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent


def under_fakes(function, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return function(x)


TRANSFORMS = {
    "make_fx": lambda function, x: make_fx(function)(x),
    "make_fx of fakes": lambda function, x: make_fx(function, tracing_mode="fake")(x),
    "make_fx of symbols": lambda function, x: make_fx(function, tracing_mode="symbolic")(x),
    "make_fx above autograd": lambda function, x: make_fx(function, pre_dispatch=True)(x),
    "export": lambda function, x: torch.export.export(function, (x,)),
    "jit.trace": torch.jit.trace,
    "vmap": lambda function, x: torch.func.vmap(function)(x.expand(2, 4)),
    "grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
    "fakes": under_fakes,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_an_execution_inside_of_a_transform_is_refused(name, held, loaded):
    captured, x = capture(torch.sin, normal(4)), normal(4)
    run = captured.load()
    with pytest.raises(offload.BindingError, match=r"inside .* as a constant"):
        TRANSFORMS[name](Around(run if loaded else captured, held=held), x)
    assert run.last_execution.n_executions == 0
    assert_same(run(x), x.sin())


def test_a_tangent_is_refused():
    run, x = capture(torch.sin, normal(4)).load(), normal(4)
    with pytest.raises(offload.BindingError, match="with a tangent"):
        tangent(run, x)
    with forward_ad.dual_level():
        assert_same(run(x), x.sin())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_capture_inside_of_a_transform_is_refused(name):
    x = normal(4)

    def capturing(held):
        return offload.capture(torch.sin, held).recorded_result

    with pytest.raises(offload.CaptureError, match="is active, under which nothing"):
        TRANSFORMS[name](Around(capturing, held=True), x)
    assert_same(capture(torch.sin, x)(x), x.sin())


# ---- code that only watches ----------------------------------------------------------------------

WATCHERS = {
    "flops": lambda: FlopCounterMode(display=False),
    "profiler": torch.profiler.profile,
    "default device": lambda: torch.device("cpu"),
    "anomalies": torch.autograd.detect_anomaly,
    "none": contextlib.nullcontext,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:.*[Pp]rofiler")
@pytest.mark.parametrize("name", WATCHERS)
def test_what_only_watches_is_not_refused(name):
    run, x = capture(torch.sin, normal(4)).load(), normal(4)
    with WATCHERS[name]():
        assert_same(run(x), x.sin())
    assert run.last_execution.n_executions == 1


def test_inside_of_a_checkpoint():
    run, weight = capture(torch.sin, normal(4)).load(), normal(4).requires_grad_()
    result = checkpoint.checkpoint(lambda one: run(one.detach()) * one, weight, use_reentrant=False)
    result.sum().backward()
    assert_same(weight.grad, weight.detach().sin())
    assert run.last_execution.n_executions == 2


def test_a_compiled_function_leaves_its_graph_for_an_execution():
    run, x = capture(torch.sin, normal(4)).load(), normal(4)
    compiled = torch.compile(lambda x: run(x * 2) + 1, backend="eager")
    assert_same(compiled(x), (x * 2).sin() + 1)
    assert_same(compiled(-x), (x * -2).sin() + 1)
    assert run.last_execution.n_executions == 2
