"""Weights are held by reference: updates are seen, and swaps refused until they are rebound."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from checks import assert_same, capture, normal
from torch import nn

import offload


def test_weights_updated_in_place_are_seen():
    model = nn.Linear(3, 2)
    captured = capture(model, normal(1, 3))
    x = normal(1, 3)
    for _ in range(2):
        with torch.no_grad():
            model.weight.add_(1)
            model.load_state_dict({key: one * 2 for key, one in model.state_dict().items()})
            expected = model(x)
        assert_same(captured(x), expected, tolerance=1e-6)


def test_swapped_storage_is_refused_until_rebound():
    model = nn.Linear(3, 2)
    captured = capture(model, normal(1, 3))
    run = captured.load()
    x = normal(1, 3)
    run(x)
    model.weight.data = normal(2, 3)
    with pytest.raises(offload.BindingError, match=r"weight.*rebind_weights"):
        run(x)
    run.rebind_weights()
    with torch.no_grad():
        assert_same(run(x), model(x), tolerance=1e-6)
    model.weight.data = normal(3, 2).t()
    with pytest.raises(offload.BindingError, match="weight"):
        run.rebind_weights()
    model.weight.data = normal(4, 3)
    with pytest.raises(offload.BindingError, match="weight"):
        run.rebind_weights()


def test_a_weight_laid_out_anew_on_its_own_storage_is_refused():
    model = nn.Linear(2, 2, bias=False)
    captured = capture(model, normal(1, 2))
    captured(normal(1, 2))
    model.weight.data = model.weight.data.t()
    with pytest.raises(offload.BindingError, match=r"weight.*strides"):
        captured(normal(1, 2))
    both = normal(8)
    module = nn.Module()
    module.register_buffer("part", both[:4])
    with offload.capture(lambda x: x + module.part) as captured:
        captured(normal(4))
    run = captured.load()
    run(normal(4))
    module.part.data = both[4:]
    with pytest.raises(offload.BindingError, match=r"part.*offset"):
        run(normal(4))


def test_swapped_between_capture_and_load():
    """The program holds the recorded weights: refused, or the new storage, never a mixture."""
    model = nn.Linear(3, 2)
    captured = capture(model, normal(1, 3))
    model.weight.data = normal(2, 3)
    x = normal(1, 3)
    with torch.no_grad():
        expected = model(x)
    with contextlib.suppress(offload.BindingError):
        assert_same(captured.load()(x), expected, tolerance=1e-6)


def test_tied_weights():
    model = nn.Module()
    model.first = nn.Linear(3, 3, bias=False)
    model.second = nn.Linear(3, 3, bias=False)
    model.second.weight = model.first.weight
    model.forward = lambda x: model.second(model.first(x))
    captured = capture(model, normal(1, 3))
    x = normal(1, 3)
    with torch.no_grad():
        model.first.weight.mul_(2)
        assert_same(captured(x), model(x), tolerance=1e-6)


def test_model_is_not_needed_after_capture():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    alive = weakref.ref(model)
    captured = capture(model, normal(1, 3))
    del model
    gc.collect()
    assert alive() is None
    x = normal(1, 3)
    with torch.no_grad():
        assert_same(captured(x), twin(x), tolerance=1e-6)


def test_forward_is_not_called_after_capture():
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    captured = capture(model, normal(1, 3))

    def fail(*_: Any) -> None:
        raise AssertionError("the model ran")

    model.forward = fail
    x = normal(1, 3)
    with torch.no_grad():
        assert_same(captured(x), twin(x), tolerance=1e-6)


def test_closed_over_tensors():
    closed, other = normal(3), normal(3)

    def function(x, factor=other):
        return x * closed + factor

    captured = capture(function, normal(3))
    closed.add_(1)
    x = normal(3)
    assert torch.equal(captured(x), function(x))
