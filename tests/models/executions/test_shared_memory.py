"""Inputs that share memory with each other or with a weight, when recorded and when replayed."""

from __future__ import annotations

import pytest
import torch
from checks import Call, Weights, binding_refused, calls_of, capture, check, normal, shifted
from torch import nn

import offload


def test_inputs_that_share_a_storage():
    def function(a, b, c):
        return a * 2 + b, c - a

    def shared():
        base = normal(12)
        return Call(base[:4], base[4:8], base[2:6])

    check(function, shared(), shared(), Call(normal(4), normal(4), normal(4)))
    check(function, Call(normal(4), normal(4), normal(4)), shared())


def test_written_inputs_overlap_as_recorded():
    def function(whole, part):
        whole.mul_(2)
        part.add_(1)
        return whole.sum(), part * 1

    def call():
        base = normal(8)
        return Call(base, base[2:5])

    def large_call():
        base = normal(40000)
        return Call(base, base[100:])

    check(function, call(), call())
    check(function, large_call(), large_call())
    captured = capture(function, *call().args)
    base = normal(8)
    overlapping = (base, base[3:6])
    for args in [(normal(8), normal(3)), overlapping]:
        before = [one.clone() for one in args]
        with pytest.raises(offload.BindingError, match="shared memory when recorded"):
            captured(*args)
        assert all(torch.equal(one, other) for one, other in zip(args, before, strict=True))


def test_written_inputs_overlap_in_a_row():
    """The first and the last one are disjoint, on the memory of those between them."""

    def function(first, second, third, fourth):
        first.add_(third[: first.numel()])
        third.mul_(fourth.sum())
        return second * 1, fourth * 1, first.sum()

    def call():
        base = normal(20)
        return Call(base[:6], base[4:11], base[9:16], base[14:])

    check(function, call(), call())
    assert len(capture(function, *call().args).program.overlaps) == 3


def test_same_tensor_recorded_then_two():
    def function(a, b):
        return a * 2 + b.exp(), a, b

    x = normal(3)
    captured = capture(function, x, x)
    a, b = normal(3), normal(3)
    first, got_a, got_b = captured(a, b)
    assert torch.equal(first, a * 2 + b.exp())
    assert got_a is a
    assert got_b is b


def test_attention_recorded_with_one_tensor():
    """Python's `is` must not decide for later calls, where query, key and value differ."""
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = normal(2, 5, 8)
    with torch.no_grad(), offload.capture(model) as captured:
        model(x, x, x)
    query, key, value = normal(2, 5, 8), normal(2, 5, 8), normal(2, 5, 8)
    for arguments in ((query, key, value), (query, query, query)):
        with torch.no_grad():
            expected = model(*arguments)  # its fast path returns other strides
        for got, one in zip(captured(*arguments), expected, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)


def test_weight_recorded_as_input():
    model = Weights()

    def function(x):
        return x * model.weight, x

    captured = capture(function, model.weight)
    x = normal(3, 2)
    with torch.no_grad():
        got, same = captured(x)
    assert torch.equal(got, x * model.weight)
    assert same is x


# ---- refused -------------------------------------------------------------------------------------


@pytest.fixture
def writer() -> offload.Executable:
    with offload.capture(lambda a, b: a.mul_(2).sum() + b) as captured:
        captured(torch.randn(4), torch.randn(4))
    return captured.load()


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_written_input_that_overlaps_another(writer, distance):
    a, b = shifted(torch.empty(4), distance)
    for call in calls_of(writer):
        with binding_refused(writer, [a, b], "args[0]", "args[1]", "overlap"):
            call(a, b)
    a, b = shifted(torch.empty(4), 4)
    assert torch.equal(writer(a.clone(), b), (a * 2).sum() + b)
    writer(a, b)


def test_inputs_that_are_only_read_may_overlap(two_results):
    a, b = shifted(torch.empty(4), 1)
    assert torch.equal(two_results(a, b)[0], a + b)
    assert torch.equal(two_results(a, a)[1], (a * a).sin())


def test_written_input_that_overlaps_a_weight():
    weight = torch.randn(8)
    with offload.capture(lambda x: x.mul_(2) + weight[:4]) as captured:
        captured(torch.randn(4))
    run = captured.load()
    with binding_refused(run, [weight], "args[0]", "overlap"):
        run(weight[2:6])


def test_input_that_overlaps_a_written_buffer(model, run):
    args, kwargs = model.arguments()
    x = model.steps.as_strided((2, 8), (0, 0))
    with binding_refused(run, [args, kwargs], "args[0]", "steps", "overlap"):
        run(x, *args[1:], **kwargs)
