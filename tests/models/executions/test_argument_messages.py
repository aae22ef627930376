"""Messages about arguments that differ in a field, are nested too deep, or cannot be watched."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import namedtuple
from typing import Any

import pytest
import torch
from checks import normal

import offload
from offload.run.arguments import tensors_of_call


@dataclasses.dataclass
class Settings:
    rate: Any
    scale: Any


Pair = namedtuple("Pair", ["rate", "scale"])


def scaled(settings: Any, x: torch.Tensor) -> torch.Tensor:
    return x + 1


def nested(depth: int, innermost: Any) -> Any:
    for _ in range(depth):
        innermost = [innermost]
    return innermost


@pytest.mark.parametrize(
    ("recorded", "given", "message"),
    [
        (Settings(1, 3), Settings(2, 3), r"args\[0\]\['rate'\]: recorded with 1, got 2"),
        (Settings(1, [2, 3]), Settings(1, [2, 4]), r"\['scale'\]\[1\]: recorded with 3, got 4"),
        (Settings({"a": 0.0}, 1), Settings({"a": -0.0}, 1), r"\['rate'\]\['a'\]: .* 0.0, got -0.0"),
        (Pair(1, 3), Pair(2, 3), r"args\[0\]\['rate'\]: recorded with 1, got 2"),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, r"\['a'\]\['b'\]\[0\]: recorded with 1, got 2"),
        ({1, 2}, {1, 3}, r"args\[0\]: recorded with a set of other content, got a set"),
    ],
)
def test_the_field_that_differs_is_named(recorded, given, message):
    captured = offload.capture(scaled, recorded, normal(2))
    with pytest.raises(offload.BindingError, match=message):
        captured(given, normal(2))


def test_a_field_that_lost_its_tensor_is_named():
    captured = offload.capture(lambda one: one.scale + 1, Settings(1, normal(2)))
    with pytest.raises(offload.BindingError, match=r"\['scale'\]: expected a tensor, got 1"):
        captured(Settings(1, 1))


@pytest.mark.parametrize("innermost", [1, torch.ones(2)])
def test_an_argument_nested_beyond_pythons_stack(innermost):
    with pytest.raises(offload.CaptureError, match=r"an argument .* deeper than Python can follow"):
        offload.capture(scaled, nested(3000, innermost), normal(2))
    captured = offload.capture(scaled, nested(2, innermost), normal(2))
    with pytest.raises(offload.BindingError, match="got a list of 1"):
        captured(nested(3000, innermost), normal(2))


def test_an_argument_that_a_short_stack_cannot_compare():
    captured = offload.capture(scaled, nested(100, 1), normal(2))
    arguments = (nested(100, 1), normal(2))
    assert len(tensors_of_call(captured.bound, arguments, {})) == 1
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        with pytest.raises(offload.BindingError, match="cannot be matched with the recorded one"):
            tensors_of_call(captured.bound, arguments, {})
    finally:
        sys.setrecursionlimit(limit)


def test_a_result_nested_beyond_pythons_stack():
    with pytest.raises(offload.CaptureError, match=r"the result .* deeper than Python can follow"):
        offload.capture(lambda x: nested(3000, x + 1), normal(2))
    x = normal(2)
    assert torch.equal(offload.capture(torch.neg, x)(x), -x)


def test_a_guard_on_a_negative_zero_shows_its_sign():
    captured = offload.capture(lambda x: x * x[0].item(), torch.zeros(2), host_reads="guard")
    with pytest.raises(
        offload.BindingError, match=r"read -0\.0 on the host, the recorded value is 0\.0;"
    ):
        captured(torch.full((2,), -0.0))


def test_a_traced_model_that_is_called_itself_in_a_block_is_named_as_such():
    model = torch.jit.trace(torch.nn.Linear(4, 4), normal(1, 4))
    with pytest.raises(offload.CaptureError, match=r"captured\(x\) .*scripted or traced"):  # noqa: SIM117
        with offload.capture(model):
            model(normal(1, 4))


def test_a_compiled_model_is_told_of_its_original():
    model = torch.compile(torch.nn.Linear(4, 4), backend=lambda graph, _: graph)
    with pytest.raises(offload.CaptureError, match=r"compiled by torch.compile.*_orig_mod"):
        offload.capture(model, normal(1, 4))
