"""Uses that no execution supports: each is a typed error that says what to do."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
import re
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from checks import assert_same, binding_refused, calls_of, capture, normal, refusal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import offload


class Scaled(torch.Tensor):
    """A user's subclass, which doubles sums."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.sum else result


class Marked(nn.Parameter):
    pass


# ---- tensors of other classes ------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_a_subclass_is_refused_as_it_is_when_recorded(nested):
    def function(x):
        return torch.sum(x["x"] if nested else x)

    def given(x):
        return {"x": x} if nested else x

    run = capture(function, given(normal(3))).load()
    x = normal(3)
    own = x.as_subclass(Scaled)
    assert torch.sum(own) == 2 * torch.sum(x)
    for call in calls_of(run):
        with binding_refused(run, [x], "a Scaled", "as_subclass(torch.Tensor)", "args[0]"):
            call(given(own))
    assert_same(run(given(own.as_subclass(torch.Tensor))), torch.sum(x))
    message = refusal(function, given(own))
    assert "a Scaled" in message
    assert "as_subclass(torch.Tensor)" in message


@pytest.mark.parametrize("kind", [nn.Parameter, Marked, nn.Buffer])
def test_parameters_and_buffers_are_plain(kind):
    x = normal(3)
    run = capture(torch.sin, kind(normal(3))).load()
    with torch.no_grad():
        for call in calls_of(run):
            assert torch.equal(call(kind(x)), x.sin())


def test_a_subclass_that_is_a_parameter_is_none_of_torchs_own():
    """isinstance accepts it."""
    x = normal(3)
    own = nn.Parameter(x.as_subclass(Scaled))
    assert isinstance(own, nn.Parameter)
    run = capture(torch.sum, x).load()
    for call in calls_of(run):
        with binding_refused(run, [x], "a Scaled", "as_subclass(torch.Tensor)"):
            call(own)
    assert "a Scaled" in refusal(torch.sum, own)


def test_a_sparse_parameter_is_refused():
    weight = nn.Parameter(torch.eye(3).to_sparse())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return torch.sparse.mm(self.weight, x)

    assert "layout torch.sparse_coo" in refusal(Model(), normal(3, 3))


def test_zeros_without_memory_are_named():
    message = refusal(lambda x: x + torch._efficientzerotensor(3), normal(3))
    assert "a tensor of zeros without memory" in message


def test_a_fake_tensor_is_refused():
    run = capture(torch.sin, normal(3)).load()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(normal(3))
    with binding_refused(run, [], "FakeTensor"):
        run(fake)


def test_a_quantized_tensor_is_named_as_one():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # from torch 2.13 on
        x = torch.quantize_per_tensor(normal(3), 0.1, 0, torch.qint8)
    assert "a quantized tensor" in refusal(torch.dequantize, x)


# ---- what a recording cannot hold --------------------------------------------------------------


@pytest.mark.parametrize("allowed", [False, True])
def test_recording_under_a_fake_mode(allowed):
    with FakeTensorMode(allow_non_fake_inputs=allowed):
        assert "a FakeTensorMode is active" in refusal(torch.sin, normal(3))
    assert torch.equal(capture(torch.sin, x := normal(3))(x), x.sin())


def by_grad(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x**3).sum(), x)[0]


def by_backward(x):
    x = x.detach().requires_grad_()
    torch.autograd.backward((x**3).sum())
    return x.grad


def by_method(x):
    x = x.detach().requires_grad_()
    (x**3).sum().backward()
    return x.grad


@pytest.mark.parametrize("function", [by_grad, by_backward, by_method])
def test_gradients_of_what_was_computed_without(function):
    """Torch would report that a tensor does not require grad, although in eager it does."""
    x = normal(4)
    assert_same(function(x), 3 * x**2)
    message = refusal(function, x)
    assert "test_user_mistakes.py:" in message
    assert "torch.enable_grad()" in message


@pytest.mark.parametrize("function", [by_grad, torch.func.grad(lambda x: (x**3).sum())])
def test_gradients_inside_of_the_forward_are_recorded(function):
    def forward(x):
        with torch.enable_grad():
            return function(x)

    captured, x = capture(forward, normal(4)), normal(4)
    assert_same(captured(x), 3 * x**2, tolerance=1e-6)


def outside_by_grad(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = (x**3).sum()
    return torch.autograd.grad(outputs=y, inputs=x)[0]


def outside_by_backward(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        ys = [(x**2 * part).sum() for part in x.detach()]
    torch.autograd.backward(ys)
    return x.grad


def outside_by_method(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = (x**3).sum()
    y.backward()
    return x.grad


@pytest.mark.parametrize(
    "function",
    [
        outside_by_grad,
        outside_by_backward,
        outside_by_method,
        lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
        torch.func.jacrev(torch.sin),
    ],
)
def test_gradients_are_recorded_wherever_they_are_asked_for(function):
    """Results computed with gradients have them, also where the mode is off again."""
    captured, x = capture(function, normal(4)), normal(4)
    assert_same(captured(x), function(x), tolerance=1e-6)


@pytest.mark.parametrize("by_name", [False, True])
def test_one_tensor_without_gradients_is_enough(by_name):
    def function(x):
        with torch.enable_grad():
            has = (x.detach().requires_grad_() ** 2).sum()
        tensors = [has, x.sum()]
        if by_name:
            torch.autograd.backward(tensors=tensors)
        else:
            torch.autograd.backward(tensors)

    assert "torch.enable_grad()" in refusal(function, normal(4))


@pytest.mark.parametrize(
    ("draw", "who"),
    [
        (random.random, "Python's random"),
        (lambda: random.seed(3) or 1.0, "Python's random"),
        (np.random.rand, "NumPy's random"),
        (lambda: np.random.normal() + random.random(), "Python's random and NumPy's random"),
    ],
)
@pytest.mark.parametrize("through", ["model", "handle"])
def test_numbers_that_are_drawn_outside_of_torch(draw, who, through):
    """An execution has those of the recording; a model may not use them."""

    class Model(nn.Module):
        def forward(self, x):
            return x * draw()

    model = Model()
    message = f"draws from {who}, or seeds it"
    with pytest.warns(UserWarning, match=message), offload.capture(model) as captured:
        recorded = (model if through == "model" else captured)(x := normal(2))
    assert torch.equal(captured(x), recorded)


@pytest.mark.parametrize("through", ["model", "handle", "function"])
def test_each_call_that_draws_is_told_of_at_its_own_line(through):
    """Python shows a warning once for each line: one of offload's lines would hide the second."""

    class Model(nn.Module):
        def forward(self, x):
            return x * random.random()

    def record(model):
        if through == "function":
            offload.capture(model, normal(2))
            return
        with offload.capture(model) as captured:
            (model if through == "model" else captured)(normal(2))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            record(Model())
        if through == "function":
            offload.capture(Model(), normal(2))
    assert {one.filename for one in seen} == {__file__}
    assert len(seen) == (2 if through == "function" else 1)


def test_another_bit_generator_of_numpys():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        assert torch.equal(capture(torch.sin, x := normal(2))(x), x.sin())
        with pytest.warns(UserWarning, match="NumPy's random"):
            capture(lambda x: x * np.random.rand(), normal(2))
    finally:
        np.random.set_bit_generator(before)


def test_functions_without_a_module_of_their_own():
    """Cython's have a descriptor for it, and functions from executed code have None."""
    names: dict[str, object] = {"square": np.square, "draw": np.random.rand}
    exec("def double(x):\n    return x * 2 if square(2.0) == 4.0 else draw()", names)
    x = normal(2)
    assert torch.equal(capture(names["double"], x)(x), x * 2)


def test_numbers_drawn_before_the_call_are_as_good_as_any():
    with offload.capture(torch.sin) as captured:
        random.random()
        np.random.rand()
        captured(normal(2))
        random.random()
        np.random.rand()
    assert captured.program.launches


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_loaded_is_not_copied(copied):
    captured, x = capture(torch.sin, normal(3)), normal(3)
    run = captured.load()
    ticket = run.submit(x)
    for one, advice in ((captured, r"offload\.open"), (run, "save"), (ticket, r"result\(\)")):
        with pytest.raises(offload.CopyError, match=advice) as caught:
            copied(one)
        assert isinstance(caught.value, TypeError)  # as copying code expects
    assert torch.equal(run(x), x.sin())
    assert torch.equal(ticket.result(), x.sin())


def test_a_model_that_holds_an_executable_says_why_it_is_not_copied():
    model = nn.Linear(2, 2)
    model.run = capture(torch.sin, normal(3)).load()
    with pytest.raises(offload.CopyError, match="an executable lies in its device's memory"):
        copy.deepcopy(model)


# ---- closed, and on other threads --------------------------------------------------------------


def test_a_closed_executable_says_what_to_do():
    run = capture(torch.sin, normal(3)).load()
    run.close()
    run.close()
    for call in calls_of(run):
        with pytest.raises(offload.ExecutionError, match="is closed: load the program again"):
            call(normal(3))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "load",
            r"call load\(\) of the result of offload.capture\(model, x\) or offload.open",
        ),
        ("compile", r"call torch.compile\(model, backend='offload'\)"),
        ("record", r"call offload.capture\(model, x\)"),
        ("run", r"call the result of offload.capture\(model, x\)"),
    ],
)
def test_parts_of_offload_say_what_to_call(name, advice):
    part = importlib.import_module(f"offload.{name}")
    assert getattr(offload, name) is part
    with pytest.raises(offload.BindingError, match=f"offload.{name} is a module of .*: {advice}"):
        part("model.offload", device="cpu")
    # Before any use of offload there is no such attribute.
    script = f"import offload; offload.{name}('model.offload')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert re.match(
        rf"AttributeError: module 'offload' has no attribute '{name}': {advice}"
        rf"|offload.errors.BindingError: offload.{name} is a module of .*: {advice}",
        last,
    )


def test_a_name_that_is_nothing_has_no_advice():
    with pytest.raises(AttributeError, match=r"^module 'offload' has no attribute 'lode'$"):
        _ = offload.lode
    with pytest.raises(
        AttributeError, match=r"'save': call save\(path\) of the result of offload.capture"
    ):
        _ = offload.save


def test_several_threads_at_once():
    captured = capture(lambda x: (x * 2).sin(), normal(1000))
    inputs = [normal(1000) for _ in range(16)]
    results: list[torch.Tensor | None] = [None] * len(inputs)

    def execute(index):
        results[index] = captured(inputs[index])

    threads = [threading.Thread(target=execute, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, (x * 2).sin())
