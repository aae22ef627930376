"""Models that torch.compile, TorchScript, torch.func or a parametrization has transformed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import Call, assert_same, capture, check, normal, normals, refusal
from torch import nn

import offload

# ---- compiled ------------------------------------------------------------------------------------


def compiled_module():
    return torch.compile(nn.Linear(2, 2), backend="eager")


def compiled_in_place():
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        compiled_module,
        compiled_in_place,
        lambda: nn.Sequential(nn.Linear(2, 2), compiled_module()),
        lambda: torch.compile(torch.sin, backend="eager"),
        lambda: compiled_module().forward,
        lambda: functools.partial(compiled_module()),
    ],
    ids=["module", "in place", "submodule", "function", "method", "partial"],
)
def test_compiled_models_are_recorded_as_their_originals(make):
    model, x = make(), normal(1, 2)
    captured = capture(model, x)
    assert "recorded as the original code" in captured.load().explain()
    with torch.no_grad():
        assert_same(captured(x), model(x))


def test_a_compiled_model_called_in_a_captured_block():
    model, x = compiled_module(), normal(1, 2)
    with torch.no_grad():
        with offload.capture(model) as captured:
            model(x)
        assert_same(captured(x), model(x))


def test_compiled_functions_inside_are_never_wrong():
    inner = torch.compile(lambda x: x * 2 + 1, backend="eager")
    module = compiled_module()
    inner(normal(2))
    check(lambda x: inner(x) + 1, *normals(2, 2))
    check(lambda x: module(x) + 1, *normals(2, 1, 2), tolerance=1e-6)


# ---- scripted ------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        if bool(x.sum() > 0):
            return self.linear(x)
        return x


@pytest.mark.filterwarnings("ignore")
def test_script_modules_through_the_handle():
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    for scripted in (torch.jit.script(model), torch.jit.trace(model, normal(1, 2))):
        captured = capture(scripted, normal(1, 2))
        x = normal(1, 2)
        with torch.no_grad():
            assert_same(captured(x), model(x), tolerance=1e-6)


def refused_or_right(model: Callable[..., Any], *calls: Call, **options: Any) -> None:
    """A call that may be refused is never wrong, and a refused capture leaves nothing behind."""
    try:
        check(model, *calls, **options)
    except offload.CaptureError:
        x = torch.randn(3)
        assert torch.equal(capture(torch.sin, x)(x), x.sin())


@pytest.mark.filterwarnings("ignore")
def test_script_functions():
    @torch.jit.script
    def function(x, y):
        for _ in range(3):
            x = x * 2 + y
        return x, [y, x]

    check(function, Call(normal(2), normal(2)), Call(normal(2), normal(2)))
    traced = torch.jit.trace(lambda x: x * 2 + x.shape[0], normal(2))
    refused_or_right(traced, *normals(2, 2))


@pytest.mark.filterwarnings("ignore")
def test_script_module_that_reads_on_the_host():
    model = torch.jit.script(Branches())
    assert "host" in refusal(model, torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore")
def test_script_function_that_lists():
    @torch.jit.script
    def function(x):
        values: list[float] = x.tolist()
        return x * values[0]

    assert "tolist" in refusal(function, normal(2))


@pytest.mark.filterwarnings("ignore")
def test_script_module_called_by_itself():
    """It takes no hooks, so it is called through the handle; the error says so."""
    model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(offload.CaptureError, match=r"captured\(x\)"), offload.capture(model):
        model(normal(1, 2))


# ---- torch.func, control flow and parametrizations -----------------------------------------------


def test_functional_transforms():
    def gradient(x):
        return torch.func.grad(lambda t: (t.sin() * t).sum())(x)

    def mapped(x):
        return torch.func.vmap(lambda row: row / row.norm())(x.view(2, 2))

    def jacobian(x):
        return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))

    def backward(x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (result,) = torch.autograd.grad((leaf.exp() * leaf).sum(), leaf)
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own decompositions are scripted
        for function in (gradient, mapped, jacobian, backward):
            check(function, *normals(3, 4), tolerance=1e-6)


def test_higher_order_operators_are_refused():
    def function(x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,))

    refusal(function, normal(3))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(kind, training):
    """Weights computed at each call; spectral_norm in training writes its vectors."""
    parametrize = getattr(nn.utils.parametrizations, kind)
    check(parametrize(nn.Linear(3, 3)).train(training), *normals(3, 2, 3), tolerance=1e-6)
