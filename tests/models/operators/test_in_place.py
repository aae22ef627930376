"""Writes in place: to inputs, activations, buffers and parameters, at each replay as in eager."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from checks import Call, capture, check, normal, normals
from torch import nn

WRITES = {
    "add_": lambda t: t.add_(1),
    "clamp_": lambda t: t.clamp_(min=0),
    "copy_": lambda t: t.copy_(t.flip(0)),
    "cumsum_": lambda t: t.cumsum_(0),
    "dropout": lambda t: F.dropout(t, 0.5, inplace=True),
    "exponential_": lambda t: t.exponential_(),
    "fill_diagonal_": lambda t: t.fill_diagonal_(2.0),
    "foreach": lambda t: torch._foreach_mul_([t[0], t[1]], 2.0),
    "iadd": lambda t: t.__iadd__(t),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0, 2]), t[1:3].clone()),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([2]), t[:1].clone()),
    "index_put_": lambda t: t.index_put_((torch.tensor([1]),), t[0].clone(), accumulate=True),
    "mask set": lambda t: t.__setitem__(t > 0, 0.5),
    "masked_fill_": lambda t: t.masked_fill_(t < 0, -1.0),
    "out": lambda t: torch.sin(t, out=t),
    "out of a part": lambda t: torch.mul(t[0], t[1], out=t[2]),
    "relu": lambda t: F.relu(t, inplace=True),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), t[1:2].clone()),
    "set item": lambda t: t.__setitem__((slice(1, None), 0), 7.0),
    "sort out": lambda t: torch.sort(t, out=(t, torch.empty(3, 3, dtype=torch.int64))),
    "swap rows": lambda t: t.__setitem__([0, 1], t[[1, 0]]),
    "uniform_": lambda t: t.uniform_(),
    "where": lambda t: t.copy_(torch.where(t > 0, t, t.mean())),
    "zero_": lambda t: t.zero_(),
}


class Stateful(nn.Module):
    """Writes a buffer and a parameter, then reads them."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("state", normal(3, 3))
        self.weight = nn.Parameter(normal(3, 3))

    def forward(self, x):
        before = self.state * 1
        self.write(self.state)
        self.write(self.weight)
        return x @ self.state + before, self.weight * x


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
def test_writes(kind):
    write = WRITES[kind]

    def on_activation(x):
        y = x * 1
        z = y + 1
        write(y)
        return y, z, y.sum()

    def on_input(x):
        before = x * 2
        write(x)
        return before + x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = normals(3, 3, 3)
        check(on_activation, *calls)
        check(on_input, *calls)
        check(Stateful(write), *calls)


class KeyValueCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(8, 4))

    def forward(self, x, position):
        self.keys.index_copy_(0, position, self.project(x))
        return torch.softmax(x @ self.keys.t(), -1) @ self.keys


def test_key_value_cache():
    calls = [Call(normal(1, 4), torch.tensor([step])) for step in (0, 1, 5, 2)]
    check(KeyValueCache(), *calls, tolerance=1e-6)


@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_training(track):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=track), nn.ReLU(), nn.Flatten()
    )
    check(model, *normals(3, 2, 3, 5, 5), tolerance=1e-6)


def test_batch_norm_with_many_channels():
    """Running statistics too large for a bytewise comparison."""
    check(nn.BatchNorm1d(20000), *normals(3, 2, 20000), tolerance=1e-6)


def test_batch_norm_on_statistics_made_in_the_forward():
    def function(x):
        mean, variance = torch.zeros(3) + 1, torch.ones(3) * 2
        normalised = F.batch_norm(x, mean, variance, training=True, momentum=0.3)
        return normalised, mean, variance

    def dead_result(x):
        mean, variance = torch.zeros(3) + 1, torch.ones(3) * 2
        F.batch_norm(x, mean, variance, training=True, momentum=0.3)
        return mean, variance

    check(function, *normals(3, 4, 3))
    check(dead_result, *normals(3, 4, 3))


def test_batch_norm_that_changes_nothing_when_recorded():
    """Warmed up with momentum 1, the recorded call writes the existing bits."""
    model = nn.BatchNorm1d(3, momentum=1.0)
    call = Call(normal(4, 3))
    with torch.no_grad():
        call.on(model)
    check(model, call, *normals(2, 4, 3), tolerance=1e-6)


def test_write_that_changes_nothing_when_recorded():
    def function(x, y):
        x.mul_(y)
        return x + 1

    check(function, Call(normal(3), torch.ones(3)), Call(normal(3), normal(3)))


def test_writes_survive_in_the_callers_tensor():
    def function(x):
        x.mul_(2)

    captured = capture(function, normal(4))
    x = torch.arange(4.0)
    version = x._version
    captured(x)
    assert torch.equal(x, torch.arange(4.0) * 2)
    assert x._version > version


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(2))

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return x * self.weight


def test_parameter_written_through_data():
    check(Scales(), *normals(4, 2))
