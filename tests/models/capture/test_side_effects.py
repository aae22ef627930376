"""Recording and loading have one eager call's effects; state replaced in Python is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from checks import assert_same, capture, normal, refusal, state_of
from torch import nn

import offload


def test_capture_and_load_leave_state_alone():
    """Capture has one eager call's effects; load, verification and proofs have none."""
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    x = normal(4, 3)
    before = x.clone()
    torch.manual_seed(5)
    with torch.no_grad():
        expected = twin(x)
    generator = torch.get_rng_state()
    torch.manual_seed(5)
    with torch.no_grad(), offload.capture(model) as captured:
        result = model(x)
    assert_same(result, expected)
    assert_same(state_of(model), state_of(twin), "after capture")
    assert torch.equal(torch.get_rng_state(), generator)
    captured.load()
    assert_same(state_of(model), state_of(twin), "after load")
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, before)


def test_written_inputs_after_capture_are_as_after_one_call():
    x, y = normal(3), normal(3)
    expected = x * y + 1

    def function(a, b):
        a.mul_(b).add_(1)
        return a.sum()

    captured = capture(function, x, y)
    assert torch.equal(x, expected)
    captured.load()
    assert torch.equal(x, expected)


def test_refused_capture_leaves_state_as_eager():
    model = nn.BatchNorm1d(3, momentum=None)  # reads its count on the host
    assert "host" in refusal(model, normal(4, 3))
    assert torch.equal(model.running_mean, torch.zeros(3))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# ---- state replaced in Python --------------------------------------------------------------------


class ReassignsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x):
        self.state = self.state + x
        return self.state * 1


class ReassignsAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.previous = torch.zeros(2)

    def forward(self, x):
        result = x + self.previous
        self.previous = x * 1
        return result


class GrowsList(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros(2)]

    def forward(self, x):
        self.seen.append(x * 1)
        return x + self.seen[-2]


class TransposesBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", normal(2, 2))

    def forward(self, x):
        self.state.t_()
        return x @ self.state


class SwapsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(2))

    def forward(self, x):
        self.weight.data = self.weight.data * 0.5
        return x * self.weight


class ReplacesParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(2))

    def forward(self, x):
        result = x * self.weight
        self.weight = nn.Parameter(self.weight * 0.5)
        return result


@pytest.mark.parametrize(
    "kind",
    [
        ReassignsBuffer,
        ReassignsAttribute,
        GrowsList,
        TransposesBuffer,
        SwapsParameter,
        ReplacesParameter,
    ],
)
def test_state_replaced_in_the_forward(kind):
    """The next eager call would use other tensors, unknown to a replay."""
    assert "attribute" in refusal(kind(), normal(2))


def test_module_without_parameters_yet():
    """A lazy module makes its parameters in its first call."""
    message = refusal(nn.LazyLinear(3), normal(2, 4))
    assert "before" in message
