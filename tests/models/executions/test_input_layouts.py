"""Inputs by layout: used in place, or copied and counted when strides differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import Call, assert_same, binding_refused, capture, normal
from torch import nn

import offload


def offset(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, somewhere inside a larger storage."""
    storage = torch.full((tensor.numel() + 2 * elements,), 99.0, dtype=tensor.dtype)
    inner = storage[elements : elements + tensor.numel()].view(tensor.shape)
    return inner.copy_(tensor)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: offset(x, 3),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        channels_last,
        lambda x: torch.stack([x, x], dim=-1)[..., 1],
        lambda x: x[:1].expand(2, -1, -1, -1),
    ],
    ids=["contiguous", "offset", "transposed", "channels_last", "strided", "expanded"],
)
@pytest.mark.parametrize("model", [nn.Conv2d(4, 3, 3), nn.Identity(), nn.GELU()], ids=str)
def test_layouts_of_inputs(layout, model):
    inputs = [layout(normal(2, 4, 6, 6)) for _ in range(3)]
    captured = capture(model, inputs[0])
    for x in inputs[1:]:
        with torch.no_grad():
            expected = model(x)
        assert_same(captured(x), expected, tolerance=1e-6)
        assert captured._default.last_execution.bytes_copied == 0


def test_other_strides_are_copied_and_counted():
    captured = capture(lambda x: x.sin() + 1, normal(4, 6))
    x = normal(6, 4).t()
    assert torch.equal(captured(x), x.sin() + 1)
    assert captured._default.last_execution.bytes_copied == x.numel() * 4
    assert torch.equal(captured(x.contiguous()), x.sin() + 1)
    assert captured._default.last_execution.bytes_copied == 0


def test_written_input_with_other_strides_is_copied_back():
    captured = capture(lambda x: x.mul_(3).sum(), normal(4, 6))
    x = normal(6, 4).t()
    before = x.clone()
    captured(x)
    assert torch.equal(x, before * 3)
    assert captured._default.last_execution.bytes_copied == 2 * x.numel() * 4


@pytest.mark.parametrize("written", [False, True])
def test_inputs_with_other_strides(written):
    """Copied and counted; a written one is copied back. Nothing else is copied."""

    def function(x, y):
        return (x.mul_(2) if written else x * 2) + y

    with offload.capture(function) as captured:
        captured(torch.randn(4, 6), torch.randn(4, 6))
    run = captured.load()
    layouts: list[Callable[[], torch.Tensor]] = [
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(8, 6)[::2],
        lambda: torch.randn(4, 12)[:, 1::2],
        lambda: torch.randn(4, 6, 2)[..., 1],
    ]
    for make in layouts:
        x, y = make(), torch.randn(4, 6)
        theirs = x.clone()
        expected = function(theirs, y)
        assert torch.equal(run(x, y), expected)
        assert torch.equal(x, theirs)
        assert run.last_execution.bytes_copied == x.numel() * 4 * (2 if written else 1)
        theirs = y.clone()
        assert torch.equal(run(y, x), function(theirs, x))
        assert torch.equal(y, theirs)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    run(x, y)
    assert run.last_execution.bytes_copied == 0


def test_expanded_input_is_copied():
    with offload.capture(lambda x: x + 1) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    x = torch.randn(6).expand(4, 6)
    assert torch.equal(run(x), x + 1)
    assert run.last_execution.bytes_copied == 4 * 6 * 4


@pytest.mark.parametrize(
    "recorded", [torch.arange(6.0).unfold(0, 3, 1), torch.ones(3).expand(4, 3)]
)
def test_recorded_elements_that_share_memory_must_share_it_again(recorded):
    with offload.capture(lambda x: x * 2) as captured:
        captured(recorded)
    run = captured.load()
    again = torch.randn(6).as_strided(recorded.shape, recorded.stride())
    assert torch.equal(run(again), again * 2)
    with binding_refused(run, [x := torch.randn(4, 3)], "args[0]", "share memory"):
        run(x)


def test_expanded_input_that_is_written_is_refused():
    """Its elements share memory, so the copy cannot be written back."""
    with offload.capture(lambda x: x.add_(torch.arange(4.0))) as captured:
        captured(torch.randn(4))
    run = captured.load()
    x = torch.zeros(1).expand(4)
    with binding_refused(run, [x], "args[0]"):
        run(x)


def test_sizes_of_one_may_have_any_stride():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.randn(1, 6))
    run = captured.load()
    x = torch.randn(6, 5).t()[2:3]
    assert torch.equal(run(x), x * 2)
    x = torch.randn(1, 6).as_strided((1, 6), (999, 1))
    assert torch.equal(run(x), x * 2)
    assert run.last_execution.bytes_copied == 0


def test_view_of_an_input_needs_the_recorded_strides():
    with offload.capture(lambda x: (x * 2, x[1:])) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    x = torch.randn(6, 4).t()
    with binding_refused(run, [x], "args[0]", "strides"):
        run(x)


def test_conjugate_inputs():
    def function(x, y):
        x.mul_(2)
        return x, x + 1, y * 2, y

    def call():
        x = torch.randn(3, dtype=torch.complex64).conj()
        return Call(x, torch.randn(3, dtype=torch.complex64).conj().imag)

    captured = capture(function, *call().args)
    one = call()
    own = [tensor.conj().clone().conj() if tensor.is_complex() else tensor for tensor in one.args]
    expected = function(*(tensor.clone() for tensor in one.args))
    got = captured(own[0], own[1])
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left.resolve_conj().resolve_neg(), right.resolve_conj())


def test_conjugate_input_for_a_plain_one():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.randn(4, dtype=torch.complex64))
    run = captured.load()
    x = torch.randn(4, dtype=torch.complex64).conj()
    assert torch.equal(run(x), x * 2)
    assert run.last_execution.bytes_copied == 32
    y = torch.randn(4, dtype=torch.complex64)
    with offload.capture(lambda x: x * 2) as captured:
        captured(y.conj())
    assert torch.equal(captured(y), y * 2)


def test_unaligned_inputs():
    """Any address that the dtype allows: vector kernels must not assume more."""
    with offload.capture(lambda x, y: torch.relu(x @ y) + x.sum()) as captured:
        captured(torch.randn(16, 16), torch.randn(16, 16))
    run = captured.load()
    for shift in (1, 3, 7):
        x = torch.randn(16 * 16 + shift)[shift:].view(16, 16)
        y = torch.randn(16 * 16 + shift)[shift:].view(16, 16)
        torch.testing.assert_close(run(x, y), torch.relu(x @ y) + x.sum(), rtol=1e-5, atol=1e-5)
        assert run.last_execution.bytes_copied == 0
